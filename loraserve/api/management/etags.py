"""Revisions as ETags: 304 for what the client already has, 412 for a change to a revision that it has not seen."""

import hashlib
import re
from typing import Any

import msgspec
from litestar import Request

from loraserve.serving.errors import ErrorCode, ServingError

ETAG = re.compile(r'(?:W/)?(?P<tag>"(?P<rev>\d{1,18})(?:-[0-9a-f]{16})?")')
ANY = "*"


def etag(rev: int) -> str:
    return f'"{rev}"'


def shown_etag(rev: int, item: Any) -> str:
    """Covers everything shown, including values that change without a new revision. If-Match compares only the
    revision."""
    return f'"{rev}-{hashlib.sha256(msgspec.json.encode(item)).hexdigest()[:16]}"'


def etag_header(rev: int) -> dict[str, str]:
    return {"etag": etag(rev)}


def has_seen(request: Request, tag: str) -> bool:
    """Whether If-None-Match contains this ETag."""
    given = request.headers.get("if-none-match")
    return given is not None and (given.strip() == ANY or tag in _tags(given))


def expected_rev(request: Request) -> int | None:
    """The revision in If-Match; None = any. Raises `ServingError`."""
    given = request.headers.get("if-match")
    if given is None or given.strip() == ANY:
        return None
    found = ETAG.fullmatch(given.strip())
    if found is None:
        raise precondition_failed(f"If-Match is {given[:64]}; it must be one ETag that this server returned.")
    return int(found["rev"])


def must_not_exist(request: Request) -> bool:
    """Whether a PUT may only create, as If-None-Match: * requests. Raises `ServingError`."""
    given = request.headers.get("if-none-match")
    if given is not None and given.strip() != ANY:
        raise precondition_failed('If-None-Match of a PUT can only be "*": create, but do not change.')
    return given is not None


def precondition_failed(message: str) -> ServingError:
    return ServingError(ErrorCode.PRECONDITION_FAILED, message)


def _tags(header: str) -> set[str]:
    return {found["tag"] for found in ETAG.finditer(header)}
