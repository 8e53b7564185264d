"""When a request came in, and `openai-processing-ms`: how long until its response began."""

import time

from litestar.types import Message, Scope

from loraserve.api.needs import TIMED

HEADER = b"openai-processing-ms"
STATE_KEY = "loraserve_received_s"


def note_received(scope: Scope) -> None:
    scope.setdefault("state", {})[STATE_KEY] = time.monotonic()


def received_s(scope: Scope) -> float:
    """`time.monotonic()` when the request's head had arrived."""
    return scope["state"][STATE_KEY]


async def add_processing_time(message: Message, scope: Scope) -> None:
    """A before_send hook."""
    if message["type"] != "http.response.start":
        return
    handler = scope.get("route_handler")
    if handler is not None and handler.opt.get(TIMED):
        elapsed_ms = round((time.monotonic() - received_s(scope)) * 1000)
        message["headers"] = [*message["headers"], (HEADER, b"%d" % elapsed_ms)]
