"""`loraserve config`: the settings of a running server."""

import rich_click as click

from loraserve.cli.admin.options import Connection, with_connection


@click.command()
@with_connection
def config(connection: Connection) -> None:
    """Show every setting of a server, and where its value came from. Needs an admin key for all tenants ('*')."""
    from loraserve.cli.admin.output import print_json, print_table

    found = connection.client().get("/v1/config")["data"]
    if connection.as_json:
        print_json(found)
        return
    print_table(("setting", "value", "from"), [(item["name"], item["value"], item["source"]) for item in found])
