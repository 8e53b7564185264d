"""--metrics-port: a second address that serves /metrics and /health without a key."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator

from loraserve.api.app_context import AppContext
from loraserve.api.metrics_app import create_metrics_app
from loraserve.cli.serve.http_server import HttpServer


@contextlib.asynccontextmanager
async def serving_metrics(
    bound: socket.socket, context: AppContext, allowed_hosts: list[str] | None
) -> AsyncGenerator[None]:
    """Serves until the context is left."""
    http = HttpServer(create_metrics_app(context, allowed_hosts))
    serving = asyncio.create_task(http.serve([bound]))
    answers = asyncio.create_task(http.answers.wait())
    await asyncio.wait([serving, answers], return_when=asyncio.FIRST_COMPLETED)
    answers.cancel()
    try:
        yield
    finally:
        http.should_exit = True
        await serving
