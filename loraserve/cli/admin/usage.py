"""`loraserve usage`: requests and tokens."""

import time
from typing import Any

import rich_click as click

from loraserve.cli.admin.options import Connection, with_connection
from loraserve.cli.number_range import NumberRange

Json = dict[str, Any]
GROUPS = ("tenant", "key", "adapter", "version")
SUMS = (
    ("requests", "num_requests"),
    ("errors", "num_errors"),
    ("prompt", "num_prompt_tokens"),
    ("cached", "num_cached_tokens"),
    ("output", "num_output_tokens"),
)
"""Columns of a row: title and field of the response."""
HOUR_S = 3600


@click.command()
@click.option(
    "--hours", type=NumberRange(0, min_open=True), default=24.0, show_default=True, help="Hours to look back."
)
@click.option("--interval", type=click.Choice(["total", "hour", "day"]), default="total", show_default=True)
@click.option("--by", "groups", type=click.Choice(GROUPS), multiple=True, help="One row per value; may be repeated.")
@click.option("--adapter", help="Only this one; '' = the base model.")
@click.option("--key", "key_id", help="Only this one.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@with_connection
def usage(
    connection: Connection,
    hours: float,
    interval: str,
    groups: tuple[str, ...],
    adapter: str | None,
    key_id: str | None,
    as_csv: bool,
) -> None:
    """Show requests and tokens. With a key for all tenants ('*'), `--by tenant` shows all of them."""
    from loraserve.cli.admin.output import print_csv, print_json

    now = time.time()
    query = {
        "from": now - hours * HOUR_S,
        "to": now,
        "interval": interval,
        "group_by": ",".join(groups),
        "adapter": adapter,
        "key_id": key_id,
    }
    client = connection.client()
    if as_csv:
        print_csv(client.get_text("/v1/usage", format="csv", **query))
        return
    found = client.get("/v1/usage", **query)
    if connection.as_json:
        print_json(found)
        return
    _print(found, interval, groups)
    if not found["complete"]:
        click.echo("older usage logs are still being added up", err=True)


def _print(found: Json, interval: str, groups: tuple[str, ...]) -> None:
    from loraserve.cli.admin.output import print_table, time_text

    shown = [name for name in GROUPS if name in groups]
    fields = ["key_id" if name == "key" else name for name in shown]
    begins = () if interval == "total" else (interval,)
    rows = [
        (
            *(time_text(row["start"]) for _ in begins),
            *(_named(field, row[field]) for field in fields),
            *(row[field] for _, field in SUMS),
            _milliseconds(row["ttft_p50_ms"]),
            _milliseconds(row["ttft_p95_ms"]),
        )
        for row in found["data"]
    ]
    print_table((*begins, *shown, *(title for title, _ in SUMS), "TTFT p50 ms", "p95 ms"), rows)


def _named(field: str, value: object) -> object:
    return "(base)" if field == "adapter" and value == "" else value


def _milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"
