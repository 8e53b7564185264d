"""The bytes of request bodies. A client that leaves before their end is no error of the server."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from litestar import Request
from litestar.exceptions import InternalServerException

from loraserve.api.http.auth import check_again
from loraserve.api.http.quoting import beginning
from loraserve.serving.errors import ErrorCode, ServingError


async def read_body(request: Request) -> bytes:
    """All of it. Raises `ServingError` where it is compressed, the client goes away before its end, or it may not call
    the route any more."""
    _check_plain(request)
    with _leaving():
        body = await request.body()
    await check_again(request)
    return body


async def stream_body(request: Request) -> AsyncIterator[bytes]:
    """As it comes. Raises `ServingError` where it is compressed, or the client goes away before its end."""
    _check_plain(request)
    with _leaving():
        async for piece in request.stream():
            if piece:
                yield piece


def _check_plain(request: Request) -> None:
    encoding = request.headers.get("content-encoding", "").strip()
    if encoding.lower() not in ("", "identity"):
        message = f"The Content-Encoding is {beginning(encoding)!r}; bodies must be sent as they are."
        raise ServingError(ErrorCode.UNSUPPORTED_MEDIA_TYPE, message, headers={"accept-encoding": "identity"})


@contextmanager
def _leaving() -> Iterator[None]:
    try:
        yield
    except InternalServerException as error:
        # What the framework calls a client that is gone.
        raise ServingError(ErrorCode.CLIENT_CLOSED_REQUEST, "The client closed the connection.") from error
