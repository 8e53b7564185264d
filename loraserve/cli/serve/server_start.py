"""Builds the engine and the HTTP application from the settings, and publishes the adapters of the command line."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loraserve_adapters.config import CONFIG_NAME
from rich.console import Console

from loraserve.cli.serve.settings import ServeSettings
from loraserve.cli.serve.start_error import StartError
from loraserve.cli.serve.startup_display import StartupDisplay
from loraserve.cli.serve.trace_start import opened_traces, usable
from loraserve.models.model_place import why_absent
from loraserve.serving.process.garbage_collector import tune_garbage_collector
from loraserve.serving.process.local_engine import LocalEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loraserve.api.app_context import AppContext
    from loraserve.api.inference.noted_app import OnEnd
    from loraserve.cli.serve.http_server import HttpServer
    from loraserve.cli.serve.option_types import LoraModule
    from loraserve.control.control_plane import ControlPlane
    from loraserve.control.declared import Declared
    from loraserve.engine.config import EngineConfig
    from loraserve.engine.model_description import ModelDescription

HTTP_MODULES = (
    "loraserve.api.app",
    "loraserve.cli.serve.configured_adapters",
    "loraserve.cli.serve.control_start",
    "loraserve.cli.serve.http_server",
    "loraserve.serving.runtime",
)
"""Modules that are needed once the engine has started."""
STARTING = "starting the engine"


@dataclass(frozen=True, slots=True)
class StartedServer:
    engine: LocalEngine
    context: AppContext
    http: HttpServer
    """It does not listen yet."""
    notes: list[str]
    """For the banner."""


async def start_server(settings: ServeSettings, console: Console, opened: contextlib.AsyncExitStack) -> StartedServer:
    """opened: receives the contexts to close last. Raises `StartError`, `EngineStartFailedError`; then nothing runs."""
    _check_temporary_folder()
    traces = usable(settings.trace_destination, console)
    if settings.enable_lora:
        console.print("--enable-lora is not needed: adapters are on by default", markup=False, soft_wrap=True)
    with StartupDisplay(console) as display:
        display.show(STARTING, 0, 1)
        # The engine's process imports torch while this one imports the HTTP modules on another core.
        starting = asyncio.create_task(LocalEngine.start(settings.engine, display.show))
        try:
            await asyncio.to_thread(_check_model, settings.engine)
            await asyncio.to_thread(_check_adapters, settings.named_adapters)
            await asyncio.to_thread(_import_http)
            from loraserve.cli.serve.control_start import opened_declared, start_errors

            with start_errors(settings):
                declared = await opened.enter_async_context(opened_declared(settings))
            on_end = await opened.enter_async_context(opened_traces(traces, settings.model_names[0], console))
            engine = await starting
        except BaseException:
            await _abandon(starting)
            raise
        display.show(STARTING, 1, 1)
        try:
            with start_errors(settings):
                return await _build(settings, engine, declared, display, on_end)
        except BaseException:
            await engine.close(0)
            raise


async def _build(
    settings: ServeSettings,
    engine: LocalEngine,
    declared: Declared,
    display: StartupDisplay,
    on_inference_end: OnEnd | None,
) -> StartedServer:
    from loraserve.api.app import create_app
    from loraserve.api.app_context import AppContext
    from loraserve.cli.serve.http_server import HttpServer
    from loraserve.control.control_plane import build_control
    from loraserve.control.names.labels import CatalogNames
    from loraserve.serving.runtime import build_runtime

    if settings.chat_template is not None:
        engine.use_chat_template(settings.chat_template.read_text(encoding="utf-8"))
    certified = settings.engine if settings.certificates else None
    runtime = build_runtime(engine, settings.serving, CatalogNames(declared.catalog))
    control = build_control(declared, runtime, certified)
    try:
        # Work that blocks the event loop must come before `start`: calls to Redis time out after a second.
        context = AppContext.of(runtime, control)
        http = HttpServer(create_app(context, on_inference_end))
        tune_garbage_collector()
        await control.start()
        notes = await _publish_adapters(settings, control, engine.model, display)
    except BaseException:
        await control.close()
        raise
    return StartedServer(engine, context, http, notes)


async def _publish_adapters(
    settings: ServeSettings, control: ControlPlane, model: ModelDescription, display: StartupDisplay
) -> list[str]:
    """Publishes the adapters of the command line, and from then on new ones in --adapter-dir. Returns notes for the
    banner."""
    from loraserve.cli.serve.configured_adapters import (
        AdapterDirWatch,
        ConfiguredAdapters,
        notes_on_chat_templates,
        notes_on_refusals,
    )

    configured = ConfiguredAdapters(control, model.layout)
    watch = None
    if settings.adapter_dir is not None and settings.scan_interval_s > 0:
        watch = await asyncio.to_thread(AdapterDirWatch, settings.adapter_dir, configured)
        control.background.every("scanning --adapter-dir", settings.scan_interval_s, watch.scan)
    named, found = settings.named_adapters, settings.found_adapters
    adapters = [*named, *found]
    refusals = await configured.publish(
        named, found, lambda num_done: display.show("loading adapters", num_done, len(adapters))
    )
    if watch is not None:
        watch.retry(refusals)
    refused = {refusal.adapter for refusal in refusals}
    published = [adapter for adapter in adapters if adapter not in refused]
    notes = await asyncio.to_thread(notes_on_chat_templates, published, model.chat_template)
    return [*notes_on_refusals(refusals, len(found)), *notes]


def _check_temporary_folder() -> None:
    """torch cannot be imported without one."""
    try:
        tempfile.gettempdir()
    except OSError as error:
        raise StartError(
            "no temporary folder is writable: mount a tmpfs at /tmp, or set TMPDIR to a writable folder"
        ) from error


def _check_model(config: EngineConfig) -> None:
    """Reports a missing model at once; the engine would do so seconds later."""
    absent = why_absent(config.model, config.revision)
    if absent is not None:
        raise StartError(absent)


def _check_adapters(adapters: Sequence[LoraModule]) -> None:
    """Reports a mistyped path at once; it would otherwise be found once the model is loaded, minutes later."""
    for adapter in adapters:
        try:
            os.stat(adapter.path / CONFIG_NAME)
        except (FileNotFoundError, NotADirectoryError) as error:
            is_folder = os.path.isdir(adapter.path)
            why = f"{CONFIG_NAME} is missing from the adapter folder" if is_folder else "there is no such folder"
            raise StartError(f"adapter {adapter.name!r} from {adapter.path}: {why}") from error
        except OSError:
            continue  # reported when it is read


def _import_http() -> None:
    for module in HTTP_MODULES:
        importlib.import_module(module)


async def _abandon(starting: asyncio.Task[LocalEngine]) -> None:
    """Stops the engine, whether or not its start has finished."""
    starting.cancel()
    await asyncio.wait([starting])
    if not starting.cancelled() and starting.exception() is None:
        await starting.result().close(0)
