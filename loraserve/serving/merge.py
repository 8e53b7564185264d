"""Merges several streams into one."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


async def merge(streams: Iterable[AsyncGenerator[list[T]]], max_open: int) -> AsyncGenerator[list[T]]:
    """Yields the streams' items, all available ones at once. A stream's error is raised and ends all streams.

    max_open: number of streams open at once; the next one starts whenever one ends. Closing the generator early closes
    every started stream. At most two lists per open stream are buffered.
    """
    queue: asyncio.Queue[list[T] | Exception | None] = asyncio.Queue(maxsize=max_open)
    to_begin = iter(streams)
    pumps: set[asyncio.Task[None]] = set()

    def begin(count: int) -> int:
        streams = [*islice(to_begin, count)]
        for stream in streams:
            pump = asyncio.create_task(_pump(stream, queue))
            pumps.add(pump)
            pump.add_done_callback(pumps.discard)
        return len(streams)

    try:
        num_open = begin(max_open)
        while num_open:
            entries = [await queue.get()]
            while not queue.empty():
                entries.append(queue.get_nowait())
            num_ended = entries.count(None)
            num_open += begin(num_ended) - num_ended
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
