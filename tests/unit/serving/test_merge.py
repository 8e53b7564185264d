import asyncio
from collections.abc import AsyncGenerator, Iterator

import pytest

from loraserve.serving.merge import merge


class Source:
    def __init__(self, items: list[int], error: Exception | None = None, blocks: bool = False) -> None:
        self.items = items
        self.error = error
        self.blocks = blocks
        self.num_taken = 0
        self.closed = False

    async def stream(self) -> AsyncGenerator[list[int]]:
        try:
            for item in self.items:
                await asyncio.sleep(0)
                self.num_taken += 1
                yield [item]
            if self.error is not None:
                raise self.error
            if self.blocks:
                await asyncio.Event().wait()
        finally:
            self.closed = True


async def gather(sources: list[Source]) -> list[int]:
    return [item async for items in merge([source.stream() for source in sources], len(sources)) for item in items]


@pytest.mark.parametrize("num_sources", [1, 2, 5])
def test_every_item_arrives_once_and_in_its_streams_order(num_sources: int) -> None:
    sources = [Source(list(range(100 * index, 100 * index + 7 + index))) for index in range(num_sources)]
    items = asyncio.run(gather(sources))
    assert len(items) == sum(len(source.items) for source in sources)
    for source in sources:
        assert [item for item in items if item in source.items] == source.items
        assert source.closed


@pytest.mark.parametrize("max_open", [1, 2, 4, 9])
def test_no_more_streams_are_open_than_the_maximum(max_open: int) -> None:
    num_open = most_open = 0

    async def counted(index: int) -> AsyncGenerator[list[int]]:
        nonlocal num_open, most_open
        num_open += 1
        most_open = max(most_open, num_open)
        for item in range(index % 3):
            await asyncio.sleep(0)
            yield [10 * index + item]
        num_open -= 1

    async def run() -> list[int]:
        return [item async for items in merge([counted(index) for index in range(7)], max_open) for item in items]

    assert sorted(asyncio.run(run())) == [10, 20, 21, 40, 50, 51]
    assert num_open == 0
    assert 1 <= most_open <= max_open


def test_closing_does_not_touch_streams_that_were_not_begun() -> None:
    sources = [Source([1], blocks=True) for _ in range(4)]
    num_taken = 0

    def streams() -> Iterator[AsyncGenerator[list[int]]]:
        nonlocal num_taken
        for source in sources:
            num_taken += 1
            yield source.stream()

    async def run() -> None:
        merged = merge(streams(), 2)
        await anext(merged)
        await merged.aclose()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(run())
    assert num_taken == 2
    assert [source.closed for source in sources] == [True, True, False, False]


@pytest.mark.parametrize("num_others", [0, 3])
def test_an_error_closes_all_streams(num_others: int) -> None:
    others = [Source([1], blocks=True) for _ in range(num_others)]

    async def run() -> None:
        with pytest.raises(ValueError, match="broken"):
            await gather([Source([1, 2], ValueError("broken")), *others])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert all(other.closed for other in others)

    asyncio.run(run())


@pytest.mark.parametrize("num_sources", [1, 3])
def test_closing_closes_the_open_streams(num_sources: int) -> None:
    sources = [Source([1, 2, 3], blocks=True) for _ in range(num_sources)]

    async def run() -> None:
        merged = merge([source.stream() for source in sources], len(sources))
        await anext(merged)
        await merged.aclose()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert all(source.closed for source in sources)

    asyncio.run(run())


def test_a_slow_consumer_holds_the_streams_back() -> None:
    sources = [Source(list(range(1000))) for _ in range(4)]

    async def run() -> None:
        merged = merge([source.stream() for source in sources], len(sources))
        await anext(merged)
        for _ in range(200):
            await asyncio.sleep(0)
        assert sum(source.num_taken for source in sources) < 20
        await merged.aclose()

    asyncio.run(run())
