"""The HTTP side of `loraserve serve`. Importing it takes half a second, so it is done while the engine starts."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from loraserve.api.app import create_app
from loraserve.api.app_context import AppContext
from loraserve.cli.http_protocol import BoundedHttpProtocol

HTTP_GRACE_S = 5
"""Connections have this long to take their last bytes once nothing runs any more."""
KEEP_ALIVE_S = 75
"""Longer than load balancers keep theirs (60 s), so that the server never closes one that is being reused."""


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handling: we drain first."""

    def __init__(self, context: AppContext) -> None:
        super().__init__(_config(context))
        self.answers = asyncio.Event()
        """Set once it listens."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.answers.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _config(context: AppContext) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(context),
        http=BoundedHttpProtocol,
        ws="none",
        lifespan="on",
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=HTTP_GRACE_S,
    )
