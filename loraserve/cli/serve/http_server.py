"""The HTTP side of `loraserve serve`. Importing it takes half a second, so it is done while the engine starts."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn
from litestar.types import ASGIApp

from loraserve.cli.serve.http_protocol import BoundedHttpProtocol
from loraserve.cli.serve.open_files import max_connections

HTTP_GRACE_S = 5
"""Time for clients to take their last bytes once no request runs."""
KEEP_ALIVE_S = 75
"""Longer than load balancers keep theirs (60 s), so that the server never closes one that is being reused."""
TICKS_BETWEEN_CHECKS = 50
"""A tick is a tenth of a second."""

_logger = logging.getLogger(__name__)


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handling, because we drain first, and with limits on slow clients."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(_config(app))
        self.answers = asyncio.Event()
        """Set once the server listens."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.answers.set()

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS_BETWEEN_CHECKS == 0:
            connections = [*self.server_state.connections]
            if len(connections) >= max_connections():
                _logger.warning("%d connections are open, the maximum: further ones are refused", len(connections))
            for connection in connections:
                if isinstance(connection, BoundedHttpProtocol):
                    connection.close_if_too_slow()
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=BoundedHttpProtocol,
        ws="none",
        lifespan="on",
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=HTTP_GRACE_S,
    )
