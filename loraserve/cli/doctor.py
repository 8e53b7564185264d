"""`loraserve doctor`: finds problems that would keep the server from running well here, with remedies."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import rich_click as click

from loraserve.cli.doctor_checks import Check, Status, all_checks
from loraserve.cli.serve.settings import DEMO, default_data_dir


@click.command(context_settings={"show_default": True})
@click.argument("model", default=str(DEMO / "model"), metavar="[MODEL]", required=False)
@click.option("--host", default="127.0.0.1", help="Address to check the port on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, help="Port to check.")
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="LORASERVE_DATA_DIR",
    help="Where the server would write. [~/.local/share/loraserve]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def doctor(model: str, host: str, port: int, data_dir: Path | None, as_json: bool) -> None:
    """Check Python, packages, CPU, compiler, memory, disk, port and model files.

    Exits with 1 if anything would keep the server from starting.
    """
    checks = all_checks(model, host, port, data_dir or default_data_dir())
    if as_json:
        click.echo(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        _print_table(checks)
    sys.exit(any(check.status is Status.FAIL for check in checks))


def _print_table(checks: list[Check]) -> None:
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    colours = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    table = Table("check", "", Column("found", overflow="fold"))
    for check in checks:
        found = Text(check.found + (f"\n→ {check.remedy}" if check.remedy else ""))
        table.add_row(check.name, Text(check.status, style=colours[check.status]), found)
    Console().print(table)
