"""API keys. Every route asks for one unless it says otherwise."""

import hashlib
import hmac

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.types import Guard

from loraserve.serving.errors import ErrorCode, ServingError

PUBLIC = {"public": True}
"""`opt` of a route that needs no key."""


def api_key_guard(api_keys: list[str]) -> Guard:
    """A guard runs on the matched route, so no trick with the URL leads past it."""
    hashes = [_sha256(key) for key in api_keys]

    def guard(connection: ASGIConnection, handler: BaseRouteHandler) -> None:
        if handler.opt.get("public"):
            return
        given = _sha256(_bearer_token(connection.headers.get("authorization", "")))
        # No early exit: the time taken says nothing about which key was close.
        if sum(hmac.compare_digest(given, known) for known in hashes) == 0:
            message = "The API key is missing or wrong. Send it as 'Authorization: Bearer <key>'."
            raise ServingError(ErrorCode.INVALID_API_KEY, message)

    return guard


def _bearer_token(header: str) -> str:
    scheme, _, token = header.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _sha256(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
