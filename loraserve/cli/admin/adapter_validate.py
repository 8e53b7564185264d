"""`loraserve adapter validate`: the checks of an upload, without a server."""

import asyncio
import sys
from pathlib import Path

import msgspec
import rich_click as click

from loraserve.api.schemas.reports import report_item
from loraserve.cli.admin.output import print_report
from loraserve.cli.serve.settings import DEMO, default_data_dir
from loraserve.control.ingest.report import validate_adapter
from loraserve.engine.config import EngineConfig
from loraserve.engine.model_description import ModelDescription
from loraserve.serving.process.local_engine import EngineStartFailedError, LocalEngine

ADAPTER_BYTES = 64 << 20


def validate_folder(folder: Path, model: str | None, as_json: bool) -> None:
    """Prints the report; exits with 1 if the adapter is refused."""
    try:
        served = asyncio.run(_description_of(model or str(DEMO / "model"), _compiled_kernels(is_demo=model is None)))
    except EngineStartFailedError as error:
        raise click.ClickException(str(error)) from error
    report = validate_adapter(folder, served.layout, served.chat_template)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report_item(report)), indent=2))
    else:
        print_report(msgspec.to_builtins(report_item(report)))
        click.echo("accepted" if report.accepted else "refused")
    sys.exit(not report.accepted)


async def _description_of(model: str, kernels: Path | None) -> ModelDescription:
    """Loads the model: only a loaded model says which linear layers it has."""
    config = EngineConfig(
        model=model,
        adapter_memory_bytes=ADAPTER_BYTES,
        max_num_seqs=1,
        enable_prefix_caching=False,
        kernel_cache_dir=None if kernels is None else str(kernels),
    )
    engine = await LocalEngine.start(config, lambda phase, done, total: None)
    try:
        return engine.model
    finally:
        await engine.close(0)


def _compiled_kernels(*, is_demo: bool) -> Path | None:
    """The folder of kernels that this user's server compiled, if there is one: compiling takes 35 s on one core."""
    try:
        folder = default_data_dir() / ("demo/kernels" if is_demo else "kernels")
    except click.UsageError:  # no home directory, so no server's folder in it
        return None
    return folder if folder.is_dir() else None
