"""`loraserve keys`: API keys of a running server or, with --data-dir, of a data directory."""

import time
from pathlib import Path
from typing import Any

import rich_click as click

from loraserve.cli.admin.limit_options import KEY_LIMITS, given_limits, with_limits
from loraserve.cli.admin.options import Connection, with_connection
from loraserve.cli.admin.paths import api_path

ROLES = click.Choice(["infer", "viewer", "operator", "admin"])
DATA_DIR = click.Path(file_okay=False, path_type=Path)


@click.group()
def keys() -> None:
    """Create, list, rotate and revoke API keys."""


@keys.command()
@click.option("--role", type=ROLES, required=True)
@click.option("--name", default="", help="Display name.")
@click.option("--for-tenant", help="Tenant of the key; '*' = all tenants. [offline: '*' for admins, else default]")
@click.option("--adapter", "adapters", multiple=True, help="Only this adapter; may be repeated.")
@click.option("--expires-in-s", type=click.IntRange(1), help="[never]")
@with_limits(KEY_LIMITS)
@click.option(
    "--data-dir",
    type=DATA_DIR,
    help="Create it here, with or without a running server: for the first admin key.",
)
@with_connection
def create(
    connection: Connection,
    role: str,
    name: str,
    for_tenant: str | None,
    adapters: tuple[str, ...],
    expires_in_s: int | None,
    data_dir: Path | None,
    **limits: Any,
) -> None:
    """Create a key and print it once; only its hash is stored."""
    body: dict[str, Any] = {
        "role": role,
        "name": name,
        "tenant": for_tenant,
        "adapters": list(adapters) or None,
        "limits": given_limits(limits),
        "expires_in_s": expires_in_s,
    }
    if data_dir is not None:
        from loraserve.cli.admin.offline_keys import create_offline

        created = create_offline(data_dir, body)
    else:
        created = connection.client().post("/v1/keys", body)
    _show_secret(connection, created)


@keys.command("list")
@with_connection
def list_keys(connection: Connection) -> None:
    """List keys, without their secrets."""
    from loraserve.cli.admin.output import limits_text, print_json, print_table, time_text

    found = connection.client().every("/v1/keys")
    if connection.as_json:
        print_json(found)
        return
    rows = [
        (
            key["id"],
            key["name"],
            key["tenant"],
            key["role"],
            "expired" if key["is_expired"] else key["status"],
            "all" if key["adapters"] is None else ", ".join(key["adapters"]),
            limits_text(key["limits"]),
            time_text(key["created_at"]),
            time_text(key["expires_at"]),
        )
        for key in found
    ]
    print_table(("id", "name", "tenant", "role", "status", "adapters", "limits", "created", "expires"), rows)


@keys.command()
@click.argument("key_id")
@click.option("--data-dir", type=DATA_DIR, help="Revoke it here, with or without a running server.")
@with_connection
def revoke(connection: Connection, key_id: str, data_dir: Path | None) -> None:
    """Revoke a key permanently and end its running requests."""
    if data_dir is not None:
        from loraserve.cli.admin.offline_keys import revoke_offline

        revoke_offline(data_dir, key_id)
    else:
        connection.client().delete(api_path("keys", key_id))
    if not connection.as_json:
        click.echo(f"{key_id} is revoked")


@keys.command()
@click.argument("key_id")
@click.option(
    "--grace-s",
    type=click.IntRange(0),
    default=3600,
    show_default=True,
    help="Seconds the old secret keeps working.",
)
@with_connection
def rotate(connection: Connection, key_id: str, grace_s: int) -> None:
    """Give a key a new secret."""
    path = api_path("keys", key_id, "rotate")
    _show_secret(connection, connection.client().post(path, {"grace_s": grace_s}))


def _show_secret(connection: Connection, created: dict[str, Any]) -> None:
    from loraserve.cli.admin.output import print_json

    if connection.as_json:
        print_json(created)
        return
    click.echo(created["secret"])
    until = created["expires_at"]
    expiry = "" if until is None else f", until {time.strftime('%Y-%m-%d %H:%M', time.localtime(until))}"
    click.echo(f"{created['role']} of tenant {created['tenant']}{expiry}. Save it: it is not shown again.", err=True)
