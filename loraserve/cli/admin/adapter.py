"""`loraserve adapter`: manages adapters of a running server; `validate` needs no server."""

import re
from pathlib import Path
from typing import Any

import rich_click as click

from loraserve.cli.adapter_place import AdapterFolderType
from loraserve.cli.admin.limit_options import NO_LIMIT, LimitType
from loraserve.cli.admin.options import Connection, with_connection
from loraserve.cli.admin.paths import api_path
from loraserve.cli.number_range import NumberRange

Json = dict[str, Any]
CANARY = re.compile(r"v?(?P<version>\d+)=(?P<percent>\d{1,3}(\.\d{1,2})?)%?")
ADAPTER = AdapterFolderType()


@click.group()
def adapter() -> None:
    """Add, list, version and remove adapters of a running server."""


@adapter.command()
@click.argument("name")
@click.argument("path", type=ADAPTER)
@click.option("--activate/--no-activate", default=True, show_default=True, help="Point NAME to this version.")
@with_connection
def add(connection: Connection, name: str, path: Path, activate: bool) -> None:
    """Upload PATH as a version of the adapter NAME.

    PATH is a folder, or a name in the local Hugging Face cache.
    """
    from loraserve.cli.admin.adapter_progress import upload_with_progress
    from loraserve.cli.admin.output import print_problems

    session = upload_with_progress(connection.client(), name, path, activate)
    print_problems(session["report"])
    result = session["result"]
    note = "" if result["created"] else " (the same content as before)"
    connection.show(session, f"{name}@v{result['version']} is ready{note}: {result['digest'][:12]}")


@adapter.command("list")
@click.option("-q", "--query", help="Part of the name or the description.")
@click.option("--tag")
@click.option("--state", type=click.Choice(["ready", "disabled", "empty", "other_base", "draining", "deleted"]))
@with_connection
def list_adapters(connection: Connection, query: str | None, tag: str | None, state: str | None) -> None:
    """List adapters; deleted ones with --state deleted."""
    from loraserve.cli.admin.output import bytes_text, print_json, print_table

    found = connection.client().every("/v1/adapters", q=query, tag=tag, state=state)
    if connection.as_json:
        print_json(found)
        return
    rows = [
        (
            item["name"],
            item["tenant"],
            item["status"],
            item["tier"],
            f"v{item['live']['n']}" if item["live"] else None,
            item["num_versions"],
            item["max_rank"],
            bytes_text(item["size_bytes"]),
        )
        for item in found
    ]
    print_table(("name", "tenant", "status", "tier", "live", "versions", "rank", "size"), rows)


@adapter.command()
@click.argument("name")
@with_connection
def show(connection: Connection, name: str) -> None:
    """Show an adapter with its aliases and versions."""
    from loraserve.cli.admin.adapter_details import print_adapter
    from loraserve.cli.admin.output import print_json

    found = connection.client().get(api_path("adapters", name))
    if connection.as_json:
        print_json(found)
    else:
        print_adapter(found)


@adapter.command()
@click.argument("name")
@click.argument("alias")
@click.argument("version", type=click.IntRange(1), required=False)
@click.option("--canary", help="Give a share of the users another version: v3=5%.")
@click.option("--delete", "is_deleted", is_flag=True, help="Remove the alias.")
@with_connection
def alias(
    connection: Connection, name: str, alias: str, version: int | None, canary: str | None, is_deleted: bool
) -> None:
    """Point NAME@ALIAS to VERSION. The alias `live` is what the bare name refers to."""
    path = api_path("adapters", name, "aliases", alias)
    if is_deleted:
        connection.client().delete(path)
        connection.show({}, f"{name}@{alias} is removed")
        return
    if version is None:
        raise click.UsageError("give the VERSION the alias should point to, or --delete")
    body: Json = {"version": version, "canary": _canary(canary)}
    found = connection.client().put(path, body)
    connection.show(found, f"{name}@{alias} is v{found['version']}{_canary_text(found)}")


@adapter.command()
@click.argument("name")
@click.option("--alias", default="live", show_default=True)
@with_connection
def rollback(connection: Connection, name: str, alias: str) -> None:
    """Point an alias back to its previous version; a second rollback undoes it."""
    found = connection.client().post(api_path("adapters", name, "rollback"), {"alias": alias})
    connection.show(found, f"{name}@{alias} is v{found['version']} again; it was v{found['previous']}")


@adapter.command()
@click.argument("name")
@click.option("--tier", type=click.Choice(["host", "device"]), default="device", show_default=True)
@click.option("--ttl-s", type=LimitType(1), default=3600, show_default=True, help="Seconds; none = until --off.")
@click.option("--off", "is_off", is_flag=True, help="Let it be evicted again.")
@with_connection
def pin(connection: Connection, name: str, tier: str, ttl_s: int | str, is_off: bool) -> None:
    """Load an adapter now and keep it in memory, for a while or until --off."""
    from loraserve.cli.admin.output import time_text

    path = api_path("adapters", name, "residency")
    if is_off:
        connection.client().delete(path)
        connection.show({}, f"{name} is no longer pinned")
        return
    found = connection.client().put(path, {"tier": tier, "ttl_s": None if ttl_s == NO_LIMIT else ttl_s})
    end = "it is unpinned" if found["until"] is None else time_text(found["until"])
    connection.show(found, f"{name} stays on {found['tier']} until {end}")


@adapter.command()
@click.argument("name")
@click.option("--version", type=click.IntRange(1), help="Only this version.")
@click.option(
    "--drain-s",
    type=NumberRange(0),
    default=30.0,
    show_default=True,
    help="Seconds for requests to finish.",
)
@with_connection
def remove(connection: Connection, name: str, version: int | None, drain_s: float) -> None:
    """Delete an adapter, which can be restored for 24 hours; or one version of it, which cannot."""
    if version is not None:
        connection.client().delete(api_path("adapters", name, "versions", version))
        connection.show({}, f"{name}@v{version} is deleted")
        return
    found = connection.client().delete(api_path("adapters", name), drain_s=drain_s)
    rest = "; some requests still use it" if found["status"] == "draining" else ""
    connection.show(found, f"{name} is deleted{rest}; `loraserve adapter restore {name}` undoes it for 24 hours")


@adapter.command()
@click.argument("name")
@with_connection
def restore(connection: Connection, name: str) -> None:
    """Undo a deletion."""
    found = connection.client().post(api_path("adapters", name, "restore"))
    connection.show(found, f"{name} is {found['status']}")


@adapter.command()
@click.argument("path", type=ADAPTER)
@click.option("--model", help="Base model: directory or cached name. [the bundled demo]")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def validate(path: Path, model: str | None, as_json: bool) -> None:
    """Check PATH against a base model, without a server. Exits with 1 if it would be refused.

    PATH is a folder, or a name in the local Hugging Face cache.
    """
    from loraserve.cli.admin.adapter_validate import validate_folder

    validate_folder(path, model, as_json)


def _canary(text: str | None) -> Json | None:
    if text is None:
        return None
    found = CANARY.fullmatch(text)
    if found is None:
        raise click.BadParameter(f"{text!r} does not have the form v3=5%", param_hint="--canary")
    return {"version": int(found["version"]), "weight_bp": round(float(found["percent"]) * 100)}


def _canary_text(alias: Json) -> str:
    canary = alias["canary"]
    return "" if canary is None else f", and v{canary['version']} for {canary['weight_bp'] / 100:g} % of the users"
