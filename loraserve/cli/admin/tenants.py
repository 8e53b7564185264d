"""`loraserve tenants`: tenants of a running server."""

import contextlib
from typing import TYPE_CHECKING, Any

import rich_click as click

from loraserve.cli.admin.limit_options import TENANT_LIMITS, given_limits, with_limits
from loraserve.cli.admin.options import Connection, with_connection
from loraserve.cli.admin.paths import api_path
from loraserve.cli.number_range import NumberRange

if TYPE_CHECKING:
    from loraserve.cli.admin.client import AdminClient

Json = dict[str, Any]
MAX_TRIES = 10
MAX_WEIGHT = 1000
"""The same as the server's, whose module takes long to import."""


@click.group()
def tenants() -> None:
    """Create, list, change and remove tenants."""


@tenants.command()
@click.argument("tenant_id", metavar="ID")
@click.option("--description", default="")
@click.option("--weight", type=NumberRange(0, MAX_WEIGHT, min_open=True), default=1.0, show_default=True)
@with_limits(TENANT_LIMITS)
@with_connection
def create(connection: Connection, tenant_id: str, description: str, weight: float, **limits: Any) -> None:
    """Create a tenant. WEIGHT is its share of the engine relative to others."""
    body = {"id": tenant_id, "description": description, "weight": weight, "limits": given_limits(limits)}
    _show(connection, connection.client(as_tenant=False).post("/v1/tenants", body))


@tenants.command("list")
@click.option("--deleted", is_flag=True, help="List deleted tenants instead of the others.")
@with_connection
def list_tenants(connection: Connection, deleted: bool) -> None:
    """List tenants; deleted ones with --deleted."""
    from loraserve.cli.admin.output import bytes_text, limits_text, print_json, print_table, time_text

    found = connection.client().every("/v1/tenants", deleted="true" if deleted else None)
    if connection.as_json:
        print_json(found)
        return
    rows = [
        (
            tenant["id"],
            tenant["status"],
            tenant["weight"],
            tenant["num_adapters"],
            bytes_text(tenant["adapter_bytes"]),
            tenant["num_keys"],
            time_text(tenant["deleted_at"]) if deleted else limits_text(tenant["limits"]),
        )
        for tenant in found
    ]
    last = "deleted" if deleted else "limits"
    print_table(("id", "status", "weight", "adapters", "size", "keys", last), rows)


@tenants.command()
@click.argument("tenant_id", metavar="ID")
@click.option("--description")
@click.option("--weight", type=NumberRange(0, MAX_WEIGHT, min_open=True))
@click.option("--suspend", "status", flag_value="suspended", help="Refuse its requests and end those that run.")
@click.option("--activate", "status", flag_value="active", help="Lift a suspension.")
@with_limits(TENANT_LIMITS)
@with_connection
def update(
    connection: Connection,
    tenant_id: str,
    description: str | None,
    weight: float | None,
    status: str | None,
    **limits: Any,
) -> None:
    """Change a tenant. Limits that are not named stay as they are; `none` lifts one."""
    path = api_path("tenants", tenant_id)
    body: Json = {"description": description, "weight": weight, "status": status}
    body = {name: value for name, value in body.items() if value is not None}
    client = connection.client(as_tenant=False)
    changed = given_limits(limits)
    _show(connection, _with_limits(client, path, body, changed) if changed else client.patch(path, body))


@tenants.command()
@click.argument("tenant_id", metavar="ID")
@with_connection
def remove(connection: Connection, tenant_id: str) -> None:
    """Delete a tenant with its keys and adapters, and end its running requests. It can be restored for 24 hours."""
    found = connection.client(as_tenant=False).delete(api_path("tenants", tenant_id))
    if found["status"] == "erased":
        connection.show(found, f"{tenant_id} is erased")
        return
    rest = "; some of it is still being stopped" if found["status"] == "draining" else ""
    undo = f"`loraserve tenants restore {tenant_id}` undoes it for 24 hours"
    connection.show(found, f"{tenant_id} is deleted{rest}; {undo}")


@tenants.command()
@click.argument("tenant_id", metavar="ID")
@with_connection
def restore(connection: Connection, tenant_id: str) -> None:
    """Undo a deletion, with the keys and adapters as they were."""
    found = connection.client(as_tenant=False).post(api_path("tenants", tenant_id, "restore"))
    connection.show(found, f"{tenant_id} is {found['status']}")


def _with_limits(client: "AdminClient", path: str, body: Json, changed: Json) -> Json:
    """Changes some limits, although the API only replaces all of them, and retries if others change the tenant.

    Raises `AdminError`.
    """
    from loraserve.cli.admin.client import AdminError, ChangedMeanwhileError

    for _ in range(MAX_TRIES):
        found = client.get(path)
        with contextlib.suppress(ChangedMeanwhileError):
            return client.patch(path, {**body, "limits": found["limits"] | changed}, expected_rev=found["rev"])
    raise AdminError(f"Others changed the tenant during each of {MAX_TRIES} tries, so it was not changed. Try again.")


def _show(connection: Connection, tenant: Json) -> None:
    from loraserve.cli.admin.output import limits_text, print_fields, print_json

    if connection.as_json:
        print_json(tenant)
        return
    print_fields(
        [
            ("tenant", tenant["id"]),
            ("description", tenant["description"]),
            ("status", tenant["status"]),
            ("weight", tenant["weight"]),
            ("limits", limits_text(tenant["limits"])),
        ]
    )
