"""Several streams as one."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merge(streams: list[AsyncIterator[T]]) -> AsyncGenerator[list[tuple[int, T]]]:
    """Items as (stream index, item), everything that is there at once. A stream's error is raised and ends all.

    Closing it early closes every stream. At most two items per stream are held.
    """
    if len(streams) == 1:
        async with aclosing(closing_iteration(streams[0])) as items:
            async for item in items:
                yield [(0, item)]
        return
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(maxsize=len(streams))
    pumps = [asyncio.create_task(_pump(index, stream, queue)) for index, stream in enumerate(streams)]
    try:
        num_open = len(streams)
        while num_open:
            entries = [await queue.get()]
            while not queue.empty():
                entries.append(queue.get_nowait())
            num_open -= entries.count(None)
            if items := _items(entries):
                yield items
    finally:
        for pump in pumps:
            pump.cancel()


def _items(entries: "list[tuple[int, T] | Exception | None]") -> list[tuple[int, T]]:
    items: list[tuple[int, T]] = []
    for entry in entries:
        if isinstance(entry, Exception):
            raise entry
        if entry is not None:
            items.append(entry)
    return items


async def _pump(index: int, stream: AsyncIterator[T], queue: "asyncio.Queue[tuple[int, T] | Exception | None]") -> None:
    try:
        async with aclosing(closing_iteration(stream)) as items:
            async for item in items:
                await queue.put((index, item))
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)


async def closing_iteration(stream: AsyncIterator[T]) -> AsyncGenerator[T]:
    """Iterate, and close the stream (where it can be closed) however the iteration ends."""
    try:
        async for item in stream:
            yield item
    finally:
        if isinstance(stream, AsyncGenerator):
            await stream.aclose()
