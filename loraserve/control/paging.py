"""One page of a list, and the cursor to the next."""

import base64
import binascii
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from loraserve.serving.errors import ServingError, invalid_value

MAX_PAGE = 500
DEFAULT_PAGE = 100

T = TypeVar("T")
Value = str | int | float


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    items: list[T]
    next_cursor: str | None
    """None on the last page."""


@dataclass(frozen=True, slots=True)
class Order(Generic[T]):
    name: str
    """Of the list and its order: part of cursors, so that those of others are refused."""
    value_of: Callable[[T], Value]
    id_of: Callable[[T], str]
    """Unique in the list. Items with the same value are in order of their ids."""
    is_down: bool = False
    """Whether the largest value comes first."""

    def sort(self, items: Iterable[T]) -> list[T]:
        return sorted(sorted(items, key=self.id_of), key=self.value_of, reverse=self.is_down)


class _Place(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The last item of a page, as its cursor says it."""

    order: str
    value: Value
    id: str

    def is_before(self, item: T, order: Order[T]) -> bool:
        value = order.value_of(item)
        if value == self.value:
            return self.id < order.id_of(item)
        if isinstance(value, str) or isinstance(self.value, str):
            is_less = str(self.value) < str(value)  # of one kind unless the cursor is made up
        else:
            is_less = self.value < value
        return is_less is not order.is_down


def page_of(items: Iterable[T], order: Order[T], *, limit: int, cursor: str | None) -> Page[T]:
    """The first `limit` items in this order, or those after the page that `cursor` belongs to. Raises `ServingError`.

    items: all of them, in any order. A cursor holds the place of its page's last item, which may be gone by now.
    """
    if not 1 <= limit <= MAX_PAGE:
        raise invalid_value("limit", f"is {limit}; it must be 1 to {MAX_PAGE}.")
    rest = order.sort(items)
    if cursor is not None:
        place = _place_of(cursor, order)
        rest = [item for item in rest if place.is_before(item, order)]
    page = rest[:limit]
    if len(page) == len(rest):
        return Page(page, None)
    last = page[-1]
    place = _Place(order.name, order.value_of(last), order.id_of(last))
    return Page(page, encode_cursor(msgspec.json.encode(place).decode()))


def _place_of(cursor: str, order: Order[T]) -> _Place:
    try:
        place = msgspec.json.decode(decode_cursor(cursor), type=_Place)
    except msgspec.DecodeError:
        raise unknown_cursor() from None
    if place.order != order.name:
        raise unknown_cursor()
    return place


def encode_cursor(place: str) -> str:
    return base64.urlsafe_b64encode(place.encode()).decode().rstrip("=")


def decode_cursor(cursor: str) -> str:
    """Raises `ServingError`."""
    try:
        return base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        raise unknown_cursor() from None


def unknown_cursor() -> ServingError:
    return invalid_value("cursor", "does not belong to this list. Start again without a cursor.")
