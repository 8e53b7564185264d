"""CORS: what lets the web pages of `--allowed-origins` call the server, and read its answers."""

from collections.abc import Sequence

from litestar.datastructures import Headers
from litestar.types import HTTPScope, Message, Send

METHODS = b"GET, POST, PUT, PATCH, DELETE"
REQUEST_HEADERS = (
    b"authorization, content-range, content-type, idempotency-key, if-match, if-none-match, x-api-key, x-tenant"
)
PREFLIGHT_S = b"600"


class CrossOrigin:
    """Cookies are never among it: a page of another origin uses a key, or an open server."""

    def __init__(self, allowed_origins: Sequence[str]) -> None:
        self._allowed = frozenset(allowed_origins)

    def origin(self, scope: HTTPScope) -> str | None:
        """Of the page that calls, if it may; None also where no page calls."""
        if not self._allowed:
            return None
        origin = Headers.from_scope(scope).get("origin")
        return origin if origin in self._allowed else None

    @staticmethod
    def is_preflight(scope: HTTPScope) -> bool:
        """Whether the browser only asks if it may call."""
        return scope["method"] == "OPTIONS" and "access-control-request-method" in Headers.from_scope(scope)


async def answer_preflight(send: Send) -> None:
    headers = [
        (b"access-control-allow-methods", METHODS),
        (b"access-control-allow-headers", REQUEST_HEADERS),
        (b"access-control-max-age", PREFLIGHT_S),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def readable_by(origin: str, send: Send) -> Send:
    """Of an answer that the page may read, headers included."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            exposed = b", ".join(name for name, _ in message["headers"])
            message["headers"] = [
                *message["headers"],
                (b"access-control-allow-origin", origin.encode()),
                (b"access-control-expose-headers", exposed),
                (b"vary", b"Origin"),
            ]
        await send(message)

    return sending
