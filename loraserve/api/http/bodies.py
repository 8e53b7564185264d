"""The bytes of request bodies. A client that disconnects before the end is not a server error."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from litestar import Request
from litestar.exceptions import InternalServerException

from loraserve.api.http.auth import check_again
from loraserve.api.http.quoting import beginning
from loraserve.serving.errors import ErrorCode, ServingError


async def read_body(request: Request) -> bytes:
    """The whole body. Raises `ServingError` if it is compressed, or if the client disconnects before its end or may no
    longer call the route."""
    _check_plain(request)
    with _leaving():
        body = await request.body()
    await check_again(request)
    return body


async def stream_body(request: Request) -> AsyncIterator[bytes]:
    """The body as it arrives. Raises `ServingError` if it is compressed or the client disconnects before its end."""
    _check_plain(request)
    with _leaving():
        async for piece in request.stream():
            if piece:
                yield piece


def _check_plain(request: Request) -> None:
    encoding = request.headers.get("content-encoding", "").strip()
    if encoding.lower() not in ("", "identity"):
        message = f"The Content-Encoding is {beginning(encoding)!r}; bodies must be sent uncompressed."
        raise ServingError(ErrorCode.UNSUPPORTED_MEDIA_TYPE, message, headers={"accept-encoding": "identity"})


@contextmanager
def _leaving() -> Iterator[None]:
    try:
        yield
    except InternalServerException as error:
        # The framework raises this if the client disconnects.
        raise ServingError(ErrorCode.CLIENT_CLOSED_REQUEST, "The client closed the connection.") from error
