"""`loraserve audit`: who changed what."""

import rich_click as click

from loraserve.cli.admin.options import Connection, with_connection


@click.command()
@click.option("--actor", help="Id of a key, or cli, config, server, open.")
@click.option("--action", help="For example alias.move; with a dot at the end a prefix, such as key.")
@click.option("--kind", type=click.Choice(["tenant", "key", "adapter", "session", "request"]))
@click.option("--limit", type=click.IntRange(1, 500), default=50, show_default=True)
@click.option("--csv", "as_csv", is_flag=True, help="Print the newest 10,000 as CSV.")
@with_connection
def audit(
    connection: Connection, actor: str | None, action: str | None, kind: str | None, limit: int, as_csv: bool
) -> None:
    """Show changes, logins and refusals, newest first."""
    from loraserve.cli.admin.output import print_csv, print_json, print_table, time_text

    query = {"actor": actor, "action": action, "kind": kind}
    client = connection.client()
    if as_csv:
        print_csv(client.get_text("/v1/audit", format="csv", **query))
        return
    found = client.first("/v1/audit", limit, **query)
    if connection.as_json:
        print_json(found)
        return
    columns = ("at", "actor", "action", "outcome", "subject", "tenant", "detail")
    rows = [(time_text(entry["at"]), *(entry[column] for column in columns[1:])) for entry in found]
    print_table(columns, rows)
