"""CORS: lets web pages of `--allowed-origins` call the server and read its responses."""

import re
from collections.abc import Sequence

from litestar.datastructures import Headers
from litestar.types import HTTPScope, Message, Send

METHODS = b"GET, POST, PUT, PATCH, DELETE"
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
PREFLIGHT_S = b"600"


class CrossOrigin:
    """Never allows cookies: a page of another origin must use a key, or an open server."""

    def __init__(self, allowed_origins: Sequence[str]) -> None:
        self._allowed = frozenset(allowed_origins)

    def origin(self, scope: HTTPScope) -> str | None:
        """The calling page's origin if it is allowed; None also if no page calls."""
        if not self._allowed:
            return None
        origin = Headers.from_scope(scope).get("origin")
        return origin if origin in self._allowed else None

    @staticmethod
    def is_preflight(scope: HTTPScope) -> bool:
        """Whether the browser only asks for permission to call."""
        return scope["method"] == "OPTIONS" and "access-control-request-method" in Headers.from_scope(scope)


async def answer_preflight(scope: HTTPScope, send: Send) -> None:
    """Allows any header: clients such as OpenAI's for JavaScript add their own, and no header grants access."""
    requested = Headers.from_scope(scope).get("access-control-request-headers", "")
    names = [name for name in map(str.strip, requested.split(",")) if HEADER_NAME.fullmatch(name)]
    headers = [
        (b"access-control-allow-methods", METHODS),
        (b"access-control-allow-headers", ", ".join(names).encode()),
        (b"access-control-max-age", PREFLIGHT_S),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def readable_by(origin: str, send: Send) -> Send:
    """Lets pages of the origin read the response, including its headers."""

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
