"""Several streams as one."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


def merge(streams: list[AsyncGenerator[list[T]]]) -> AsyncGenerator[list[T]]:
    """Their items, everything that is there at once. A stream's error is raised and ends all.

    Closing it early closes every stream. At most two lists per stream are held.
    """
    return streams[0] if len(streams) == 1 else _merge(streams)


async def _merge(streams: list[AsyncGenerator[list[T]]]) -> AsyncGenerator[list[T]]:
    queue: asyncio.Queue[list[T] | Exception | None] = asyncio.Queue(maxsize=len(streams))
    pumps = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
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


def _items(entries: list[list[T] | Exception | None]) -> list[T]:
    items: list[T] = []
    for entry in entries:
        if isinstance(entry, Exception):
            raise entry
        if entry is not None:
            items += entry
    return items


async def _pump(stream: AsyncGenerator[list[T]], queue: "asyncio.Queue[list[T] | Exception | None]") -> None:
    try:
        async with aclosing(stream):
            async for items in stream:
                await queue.put(items)
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)
