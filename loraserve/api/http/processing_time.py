"""A request's time of arrival, and `openai-processing-ms`: the time until its response began."""

import time

from litestar.types import Scope

from loraserve.api.http.needs import TIMED

HEADER = b"openai-processing-ms"
STATE_KEY = "loraserve_received_s"


def note_received(scope: Scope) -> None:
    scope.setdefault("state", {})[STATE_KEY] = time.monotonic()


def received_s(scope: Scope) -> float:
    """`time.monotonic()` when the request's head had arrived."""
    return scope["state"][STATE_KEY]


def processing_time_headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Empty if the route is not timed."""
    handler = scope.get("route_handler")
    if handler is None or not handler.opt.get(TIMED):
        return []
    elapsed_ms = round((time.monotonic() - received_s(scope)) * 1000)
    return [(HEADER, b"%d" % elapsed_ms)]
