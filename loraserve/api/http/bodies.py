"""The bytes of request bodies. A client that leaves before their end is no error of the server."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from litestar import Request
from litestar.exceptions import InternalServerException

from loraserve.api.http.auth import check_again
from loraserve.serving.errors import ErrorCode, ServingError


async def read_body(request: Request) -> bytes:
    """All of it. Raises `ServingError` where the client goes away before, or may not call the route any more."""
    with _leaving():
        body = await request.body()
    check_again(request)
    return body


async def stream_body(request: Request) -> AsyncIterator[bytes]:
    """As it comes. Raises `ServingError` where the client goes away before its end."""
    with _leaving():
        async for piece in request.stream():
            if piece:
                yield piece


@contextmanager
def _leaving() -> Iterator[None]:
    try:
        yield
    except InternalServerException as error:
        # What the framework calls a client that is gone.
        raise ServingError(ErrorCode.CLIENT_CLOSED_REQUEST, "The client closed the connection.") from error
