"""`loraserve version`."""

import platform
from importlib import metadata

import rich_click as click


def installed_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@click.command()
def version() -> None:
    """Print the versions of loraserve and of what it runs on."""
    click.echo(f"loraserve {installed_version('loraserve') or '(not installed)'}")
    click.echo(f"python {platform.python_version()}")
    for distribution in ("torch", "transformers", "safetensors", "litestar", "uvicorn"):
        click.echo(f"{distribution} {installed_version(distribution) or '(not installed)'}")
