"""The progress bar of commands that send many requests."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

REFRESH_PER_S = 2
"""Low, to leave the CPU cores to the server."""


def request_progress() -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    failed = TextColumn("{task.fields[failed]}", style="red")
    return Progress(*columns, failed, console=Console(stderr=True), refresh_per_second=REFRESH_PER_S)
