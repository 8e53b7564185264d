"""Checks that every HTTP request passes before routing, whether or not its path exists."""

from collections.abc import Awaitable, Callable

import msgspec
from litestar.datastructures import Headers
from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send

from loraserve.api.http.cross_origin import CrossOrigin, answer_preflight, readable_by
from loraserve.api.http.errors import error_body, error_headers, status_of
from loraserve.api.http.open_mode import OpenModeProtection
from loraserve.api.http.processing_time import note_received, processing_time_headers
from loraserve.api.http.request_id import request_id_header
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.serving.runtime import Runtime

BYTES_PER_HEADER = 4
"""Colon, space and CRLF."""


class FrontDoor:
    """The outermost ASGI app: refuses requests that must not reach the inner one, with errors in the same format."""

    def __init__(self, app: ASGIApp, runtime: Runtime, is_open: Callable[[], bool]) -> None:
        """is_open: whether requests currently need no key."""
        settings = runtime.settings
        self._app = app
        self._is_open = is_open
        self._metrics = runtime.metrics
        self._max_header_bytes = settings.limits.max_header_bytes
        self._cross_origin = CrossOrigin(settings.allowed_origins)
        self._open_mode = (
            OpenModeProtection(settings.allowed_hosts, settings.allowed_origins)
            if settings.allowed_hosts is not None
            else None
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            note_received(scope)
            origin = self._cross_origin.origin(scope)
            if origin is not None:
                send = readable_by(origin, send)
            send = _with_headers_of_all(scope, send)
            try:
                self._check(scope)
                if origin is not None and self._cross_origin.is_preflight(scope):
                    await answer_preflight(scope, send)
                    return
            except ServingError as error:
                self._metrics.error(error.code)
                await _send_error(error, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: HTTPScope) -> None:
        size_bytes = sum(len(name) + len(value) + BYTES_PER_HEADER for name, value in scope["headers"])
        size_bytes += len(scope["raw_path"]) + len(scope["query_string"])
        if size_bytes > self._max_header_bytes:
            message = f"The URL and headers have {size_bytes} bytes; the limit is {self._max_header_bytes}."
            raise ServingError(ErrorCode.HEADERS_TOO_LARGE, message)
        if self._open_mode is not None and self._is_open():
            self._open_mode.check(Headers.from_scope(scope), scope["method"], scope["path"])


def _with_headers_of_all(scope: Scope, send: Send) -> Send:
    """Adds the headers that every response carries, whatever produced it.

    Neither a coroutine nor a Litestar hook, because those would be awaited for each token of a stream.
    """

    def sending(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], request_id_header(scope), *processing_time_headers(scope)]
        return send(message)

    return sending


async def _send_error(error: ServingError, send: Send) -> None:
    body = msgspec.json.encode(error_body(error))
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error_headers(error)}
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status_of(error), "headers": encoded})
    await send({"type": "http.response.body", "body": body, "more_body": False})
