"""One page of a list, and the cursor to the next."""

import base64
import binascii
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from loraserve.serving.errors import ServingError, invalid_value

MAX_PAGE = 500
DEFAULT_PAGE = 100

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    items: list[T]
    next_cursor: str | None
    """None on the last page."""


def page_of(items: Sequence[T], id_of: Callable[[T], str], *, limit: int, cursor: str | None) -> Page[T]:
    """The items after the one that `cursor` names, at most `limit`. Raises `ServingError`.

    items: in the order of the list. A cursor holds the id of its page's last item; if that item no longer exists, the
    cursor is refused.
    """
    if not 1 <= limit <= MAX_PAGE:
        raise invalid_value("limit", f"is {limit}; it must be 1 to {MAX_PAGE}.")
    start = 0 if cursor is None else _start(items, id_of, cursor)
    page = list(items[start : start + limit])
    is_last = start + limit >= len(items)
    return Page(page, None if is_last or not page else encode_cursor(id_of(page[-1])))


def encode_cursor(last_id: str) -> str:
    return base64.urlsafe_b64encode(last_id.encode()).decode().rstrip("=")


def decode_cursor(cursor: str) -> str:
    """Raises `ServingError`."""
    try:
        return base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        raise _unknown_cursor() from None


def _start(items: Sequence[T], id_of: Callable[[T], str], cursor: str) -> int:
    last_id = decode_cursor(cursor)
    for index, item in enumerate(items):
        if id_of(item) == last_id:
            return index + 1
    raise _unknown_cursor()


def _unknown_cursor() -> ServingError:
    return invalid_value(
        "cursor", "does not belong to this list, or its item no longer exists. Start again without a cursor."
    )
