"""Starts the sending of a span for each inference request, if traces are wanted."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from rich.console import Console

from loraserve.cli.serve.setting_values import without_secrets
from loraserve.cli.serve.start_error import StartError
from loraserve.cli.serve.trace_settings import TraceDestination
from loraserve.cli.version import installed_version

if TYPE_CHECKING:
    from loraserve.api.inference.noted_app import OnEnd
    from loraserve.serving.telemetry.span_export import SpanExport

MODULES = ("loraserve.serving.telemetry.span_export", "loraserve.api.inference.request_spans")
"""Only these import OpenTelemetry, which takes 0.4 s."""


def usable(destination: TraceDestination | None, console: Console) -> TraceDestination | None:
    """None = no traces; prints a line if they were requested but cannot be sent. Raises `StartError`."""
    if destination is None or destination.problem is None:
        return destination
    _refuse(destination, destination.problem, console)
    return None


@contextlib.asynccontextmanager
async def opened_traces(
    destination: TraceDestination | None, base_name: str, console: Console
) -> AsyncGenerator[OnEnd | None]:
    """Yields the function to call at each request's end. The last spans are sent on exit. Raises `StartError`."""
    export = None if destination is None else await _started(destination, console)
    if export is None:
        yield None
        return
    from loraserve.api.inference.request_spans import RequestSpans

    try:
        yield RequestSpans(export.tracer, base_name).record
    finally:
        await export.close()


async def _started(destination: TraceDestination, console: Console) -> SpanExport | None:
    shown = without_secrets(destination.endpoint)
    try:
        for module in MODULES:
            await asyncio.to_thread(importlib.import_module, module)
        from loraserve.serving.telemetry.span_export import SpanExport

        export = SpanExport(destination.endpoint, shown, installed_version("loraserve") or "")
    except Exception as error:  # incompatible packages, or a variable that the SDK refuses
        _refuse(destination, f"{type(error).__name__}: {error}", console)
        return None
    console.print(f"traces are sent to {shown}", markup=False, highlight=False, soft_wrap=True)
    return export


def _refuse(destination: TraceDestination, problem: str, console: Console) -> None:
    """Raises `StartError` if the server must not start without traces."""
    if destination.is_fatal:
        raise StartError(f"{destination.source}: {problem}")
    message = f"no traces are sent, although {destination.source} is set: {problem}"
    console.print(message, markup=False, highlight=False, soft_wrap=True)
