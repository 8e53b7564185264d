"""`loraserve ui`: the console."""

import sys
from pathlib import Path

import rich_click as click

from loraserve.cli.admin.options import Connection, with_connection
from loraserve.live.key_names import DEFAULT_PREFIX


@click.group()
def ui() -> None:
    """The console in the browser."""


@ui.command()
@click.option("--key-id", help="Key whose permissions the link grants. [that of --api-key, else the newest admin key]")
@click.option(
    "--data-dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Data directory of a server on this machine, instead of --url and --api-key.",
)
@click.option("--redis-url", help="With --data-dir: the server's --redis-url. [its private Valkey]")
@click.option("--redis-prefix", default=DEFAULT_PREFIX, show_default=True)
@click.option("--print", "to_pipe", is_flag=True, help="Print the link even when stdout is not a terminal.")
@with_connection
def login(
    connection: Connection,
    key_id: str | None,
    data_dir: Path | None,
    redis_url: str | None,
    redis_prefix: str,
    to_pipe: bool,
) -> None:
    """Print a link that logs a browser in, once, within 15 minutes."""
    if not to_pipe and not sys.stdout.isatty():
        message = "stdout is not a terminal, and the link is as good as a key; use --print to print it anyway"
        raise click.ClickException(message)
    if data_dir is not None:
        from loraserve.cli.admin.ui_links import link_from_data_dir

        click.echo(link_from_data_dir(data_dir, key_id, redis_url, redis_prefix, connection.url))
        return
    client = connection.client()
    base = str(client.http.base_url).rstrip("/")
    if not connection.api_key and client.get("/v1/session")["open"]:
        click.echo(f"{base}/ui/")
        click.echo("The server requires no key: anyone on its machine is admin.", err=True)
        return
    link = client.post("/v1/session/links", {} if key_id is None else {"key_id": key_id})
    click.echo(f"{base}/ui/#/login/{link['token']}")
