"""An upload with a progress bar."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from loraserve.cli.admin.adapter_upload import FILES, upload
from loraserve.cli.admin.client import AdminClient


def upload_with_progress(client: AdminClient, name: str, folder: Path, activate: bool) -> dict[str, Any]:
    """Shows a bar on a terminal, and nothing if stderr is not one."""
    console = Console(stderr=True)
    total = sum((folder / file).stat().st_size for file in FILES if (folder / file).is_file())
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("uploading", total=total)
        return upload(
            client,
            name,
            folder,
            activate=activate,
            on_sent=lambda num_bytes: progress.update(task, completed=num_bytes),
            on_state=lambda state: progress.update(task, description=state),
        )
