"""The client of commands that send many requests, and a server for it in the same event loop."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from loraserve.cli.async_http_client import async_http_client

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def client_of(
    handler: Handler, path: str = "/", api_key: str | None = None
) -> AsyncIterator[aiohttp.ClientSession]:
    """path: of the client's base URL. The handler gets all requests."""

    async def answer(request: web.Request) -> web.StreamResponse:
        return await handler(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server, async_http_client(str(server.make_url(path)), api_key) as client:
        yield client


async def stream(request: web.Request, chunks: list[bytes], status: int = 200) -> web.StreamResponse:
    """Sends each as an HTTP chunk."""
    response = web.StreamResponse(status=status)
    response.enable_chunked_encoding()
    await response.prepare(request)
    for chunk in chunks:
        await response.write(chunk)
    return response
