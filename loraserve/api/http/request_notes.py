"""What becomes known of an inference request on its way, for whoever tells of it at its end.

Nothing is noted, and nothing looked at, unless somebody wants to.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send

from loraserve.api.http.needs import ACTION
from loraserve.control.names.resolve import Target
from loraserve.control.requests.running import Asked
from loraserve.control.tenancy.principal import Action
from loraserve.serving.errors import ErrorCode

if TYPE_CHECKING:
    from loraserve.api.inference.call import InferenceCall

STATE_KEY = "loraserve_request_notes"

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RequestNotes:
    """None = it did not come to that."""

    asked: Asked | None = None
    target: Target | None = None
    """What was asked for; what was admitted may be newer."""
    call: InferenceCall | None = None
    """Once it was admitted."""
    status: int | None = None
    """Of the response, once that began."""
    error_code: ErrorCode | None = None
    """Of an error that was answered; not of one in the middle of a stream."""
    ended_s: float = 0.0
    """`time.monotonic()` when the response was sent, or nobody was there to take it."""


OnEnd = Callable[[HTTPScope, RequestNotes], None]
"""Called on the event loop, once for each request that reached a route for inference."""


class NotedApp:
    """An ASGI app that takes notes of the requests to the one inside it."""

    def __init__(self, app: ASGIApp, on_end: OnEnd) -> None:
        self._app = app
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        notes = RequestNotes()
        scope["state"][STATE_KEY] = notes

        def sending(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                notes.status = message["status"]
            return send(message)

        try:
            await self._app(scope, receive, sending)
        finally:
            if _is_inference(scope):
                notes.ended_s = time.monotonic()
                self._tell(scope, notes)

    def _tell(self, scope: HTTPScope, notes: RequestNotes) -> None:
        try:
            self._on_end(scope, notes)
        except Exception:  # the request itself was answered, or has an error of its own to end with
            logger.exception("a request could not be told of")


def notes_of(scope: Scope) -> RequestNotes | None:
    """None where nobody wants any."""
    return scope["state"].get(STATE_KEY)


def _is_inference(scope: HTTPScope) -> bool:
    """Whether routing found a route for it. Its key may have been refused."""
    handler = scope.get("route_handler")
    return handler is not None and handler.opt.get(ACTION) is Action.INFER
