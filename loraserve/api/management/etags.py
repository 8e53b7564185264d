"""Revisions in ETags: 304 for what the client has already, 412 for a change of what it has not seen."""

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
    """Of all that is shown, also of what changes without a revision; for If-Match its revision alone counts."""
    return f'"{rev}-{hashlib.sha256(msgspec.json.encode(item)).hexdigest()[:16]}"'


def etag_header(rev: int) -> dict[str, str]:
    return {"etag": etag(rev)}


def has_seen(request: Request, tag: str) -> bool:
    """Whether If-None-Match names this ETag."""
    given = request.headers.get("if-none-match")
    return given is not None and (given.strip() == ANY or tag in _tags(given))


def expected_rev(request: Request) -> int | None:
    """What If-Match names; None = any. Raises `ServingError`."""
    given = request.headers.get("if-match")
    if given is None or given.strip() == ANY:
        return None
    found = ETAG.fullmatch(given.strip())
    if found is None:
        raise precondition_failed(f"If-Match is {given[:64]}; it must be one ETag as this server gave it.")
    return int(found["rev"])


def must_not_exist(request: Request) -> bool:
    """Whether a PUT is only to create."""
    given = request.headers.get("if-none-match")
    if given is not None and given.strip() != ANY:
        raise precondition_failed('If-None-Match of a PUT can only be "*": create it, but change nothing.')
    return given is not None


def precondition_failed(message: str) -> ServingError:
    return ServingError(ErrorCode.PRECONDITION_FAILED, message)


def _tags(header: str) -> set[str]:
    return {found["tag"] for found in ETAG.finditer(header)}
