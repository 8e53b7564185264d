"""Lists that are walked page by page while they change."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from loraserve.api.routes import uploads, versions
from loraserve.control.adapters.queries import AdapterSort, order_of
from loraserve.control.paging import Order, Page, encode_cursor, page_of
from loraserve.control.tenancy import keys, tenants
from loraserve.serving.errors import ServingError

Item = tuple[str, float]
ORDERS: list[Order[Item]] = [
    Order("name", lambda item: item[0], lambda item: item[0]),
    Order("-name", lambda item: item[0], lambda item: item[0], is_down=True),
    Order("size", lambda item: item[1], lambda item: item[0]),
    Order("-size", lambda item: item[1], lambda item: item[0], is_down=True),
]
ITEMS: list[Item] = [(name, size) for name, size in zip("gcaebdf", (1, 2, 1.5, 2, 0, 1, 0.1 + 0.2), strict=True)]


def walk(order: Order[Item], limit: int) -> list[Page[Item]]:
    pages = [page_of(ITEMS, order, limit=limit, cursor=None)]
    while (cursor := pages[-1].next_cursor) is not None:
        pages.append(page_of(ITEMS, order, limit=limit, cursor=cursor))
    return pages


def names(items: list[Item]) -> str:
    return "".join(name for name, _ in items)


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8])
def test_pages_hold_every_item_once_and_in_order(limit: int) -> None:
    walked = [names([item for page in walk(order, limit) for item in page.items]) for order in ORDERS]
    assert walked == ["abcdefg", "gfedcba", "bfdgace", "ceadgfb"], "equal sizes are in order of names"
    assert len(walk(ORDERS[0], limit)) == -(-len(ITEMS) // limit)


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.name)
def test_a_walk_goes_on_after_the_items_of_its_page_are_gone(order: Order[Item]) -> None:
    left, deleted = list(ITEMS), []
    cursor: str | None = None
    while left:
        page = page_of(left, order, limit=2, cursor=cursor)
        cursor = page.next_cursor
        deleted += page.items
        left = [item for item in left if item not in page.items]
        assert bool(left) is (cursor is not None)
    assert deleted == order.sort(ITEMS)


def test_an_item_that_is_new_before_the_cursor_shifts_nothing() -> None:
    first = page_of(ITEMS, ORDERS[0], limit=3, cursor=None)
    assert names(page_of([*ITEMS, ("aa", 1)], ORDERS[0], limit=3, cursor=first.next_cursor).items) == "def"


@pytest.mark.parametrize("place", [["size", 1, "a"], ["name", "a"], ["name", "a", "a", 1], ["name", None, "a"], {}])
def test_a_cursor_of_another_list_is_refused(place: object) -> None:
    with pytest.raises(ServingError) as refused:
        page_of(ITEMS, ORDERS[0], limit=2, cursor=encode_cursor(msgspec.json.encode(place).decode()))
    assert refused.value.param == "cursor"


@pytest.mark.parametrize("value", [5, -1, 1e300, "5", ""])
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.name)
def test_a_made_up_value_of_another_type_breaks_nothing(order: Order[Item], value: object) -> None:
    cursor = encode_cursor(msgspec.json.encode([order.name, value, "a"]).decode())
    assert set(page_of(ITEMS, order, limit=7, cursor=cursor).items) <= set(ITEMS)


def test_lists_are_newest_first_and_know_their_own_cursors() -> None:
    def item(number: int) -> Any:
        doc = SimpleNamespace(created_at=number, name=f"{number}", tenant="t")
        return SimpleNamespace(id=f"{number}", n=number, created_at=number, doc=doc)

    by_age = order_of(AdapterSort.NEWEST, {}), order_of(AdapterSort.CREATED, {})
    orders: list[Order[Any]] = [keys.NEWEST_FIRST, uploads.NEWEST_FIRST, versions.NEWEST_FIRST, by_age[0]]
    for order in orders:
        assert [each.id for each in order.sort(map(item, (1, 3, 2)))] == ["3", "2", "1"]
    orders += [tenants.BY_ID, by_age[1]]
    for order in orders:
        cursor = page_of(map(item, range(3)), order, limit=1, cursor=None).next_cursor
        for other in orders:
            if other is not order:
                with pytest.raises(ServingError):
                    page_of(map(item, range(3)), other, limit=1, cursor=cursor)
