"""Every response carries x-request-id: the client's own if it is harmless, else a new one."""

import re
import uuid

from litestar.types import Scope

HEADER = b"x-request-id"
HARMLESS_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
STATE_KEY = "loraserve_request_id"
OURS_KEY = "loraserve_own_request_id"


def request_id_of(scope: Scope) -> str:
    """The same for the whole request."""
    known = scope["state"].get(STATE_KEY)
    if known is None:
        given = next((value for name, value in scope["headers"] if name == HEADER), b"").decode("latin-1")
        known = given if HARMLESS_ID.fullmatch(given) else uuid.uuid4().hex
        scope["state"][STATE_KEY] = known
    return known


def own_request_id(scope: Scope) -> str:
    """Chosen by us, so never used before: `request_id_of`, unless the client chose that."""
    known = scope["state"].get(OURS_KEY)
    if known is None:
        is_given = any(
            name == HEADER and value.decode("latin-1") == request_id_of(scope) for name, value in scope["headers"]
        )
        known = uuid.uuid4().hex if is_given else request_id_of(scope)
        scope["state"][OURS_KEY] = known
    return known


def request_id_header(scope: Scope) -> tuple[bytes, bytes]:
    return HEADER, request_id_of(scope).encode()
