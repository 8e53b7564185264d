"""The `loraserve` command. Subcommands are imported when named, so that help and completion stay fast."""

import errno
import importlib
import sys
from typing import Any

import rich_click as click

from loraserve.serving.process import standard_streams

COMMANDS = {
    "serve": "serve.command",
    "adapter": "admin.adapter",
    "keys": "admin.keys",
    "tenants": "admin.tenants",
    "usage": "admin.usage",
    "audit": "admin.audit",
    "ui": "admin.ui",
    "chat": "chat",
    "batch": "batch",
    "bench": "bench",
    "doctor": "doctor",
    "config": "admin.config",
    "openapi": "openapi",
    "version": "version",
}
"""Each is the attribute of its name in that module of `loraserve.cli`; importing the module must stay cheap."""


class _LazyGroup(click.RichGroup):
    def main(self, *args: Any, **extra: Any) -> Any:
        try:
            return super().main(*args, **extra)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            where = f" {error.filename}" if error.filename else ""
            click.echo(f"error: cannot write{where}: {error.strerror}", err=True)
            sys.exit(1)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return getattr(importlib.import_module(f"loraserve.cli.{COMMANDS[cmd_name]}"), cmd_name)


def _print_version(ctx: click.Context, _param: click.Parameter, is_wanted: bool) -> None:
    if is_wanted:
        from loraserve.cli.version import installed_version

        click.echo(f"loraserve {installed_version('loraserve') or '(not installed)'}")
        ctx.exit()


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version; `loraserve version` prints more.",
)
def main() -> None:
    """Serve thousands of LoRA adapters over one base model, any mix of them in one batch."""
    standard_streams.open_closed()


if __name__ == "__main__":
    main(prog_name="loraserve")
