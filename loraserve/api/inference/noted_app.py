"""Takes notes about inference requests and reports each at its end.

Only installed if reports are wanted; otherwise nothing is noted.
"""

import logging
import time
from collections.abc import Awaitable, Callable

from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send

from loraserve.api.http.errors import answered_code
from loraserve.api.http.needs import ACTION
from loraserve.api.inference.call import NOTES_KEY, RequestNotes
from loraserve.control.tenancy.principal import Action

logger = logging.getLogger(__name__)


OnEnd = Callable[[HTTPScope, RequestNotes], None]
"""Called on the event loop, once per request that reached an inference route."""


class NotedApp:
    """An ASGI app that takes notes about requests to the app inside it."""

    def __init__(self, app: ASGIApp, on_end: OnEnd) -> None:
        self._app = app
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        notes = RequestNotes()
        scope["state"][NOTES_KEY] = notes

        def sending(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                notes.status = message["status"]
            return send(message)

        try:
            await self._app(scope, receive, sending)
        finally:
            if _is_inference(scope):
                notes.ended_s = time.monotonic()
                notes.error_code = answered_code(scope)
                self._report(scope, notes)

    def _report(self, scope: HTTPScope, notes: RequestNotes) -> None:
        try:
            self._on_end(scope, notes)
        except Exception:  # the request was already answered, or ends with its own error
            logger.exception("a request could not be reported")


def _is_inference(scope: HTTPScope) -> bool:
    """Whether routing found an inference route. The request's key may have been refused."""
    handler = scope.get("route_handler")
    return handler is not None and handler.opt.get(ACTION) is Action.INFER
