"""Work that stops when the client disconnects. Litestar does not cancel handlers itself."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from litestar import Request

from loraserve.serving.errors import ErrorCode, ServingError

T = TypeVar("T")


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result. If the client disconnects, cancels the work and raises `ServingError`."""
    task = asyncio.ensure_future(work)
    try:
        await wait_connected(request, task, timeout_s=None)
        return task.result()
    finally:
        task.cancel()


async def wait_connected(request: Request, task: asyncio.Future[T], timeout_s: float | None) -> None:
    """Returns when the task is done or the timeout expires. Raises `ServingError` if the client disconnects.

    NOTE: the body must have been read already, so that the only message that can still arrive is the disconnect.
    """
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if gone.done() and not task.done():
            raise ServingError(ErrorCode.CLIENT_CLOSED_REQUEST, "The client closed the connection.")
    finally:
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
