"""Long loops on the event loop."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

T = TypeVar("T")

AT_ONCE = 500


async def with_pauses(items: Iterable[T]) -> AsyncIterator[T]:
    """The same items; other tasks run after every 500 of them."""
    for number, item in enumerate(items, 1):
        yield item
        if number % AT_ONCE == 0:
            await asyncio.sleep(0)
