import asyncio

import pytest

from loraserve.control.timed_cache import TimedCache
from tests.support.clock import Clock


def test_an_answer_is_cached_for_a_while_and_concurrent_callers_share_one_load() -> None:
    async def scenario() -> None:
        clock, asked = Clock(), []

        async def load(key: str) -> int:
            asked.append(key)
            await asyncio.sleep(0)
            return len(asked)

        cache: TimedCache[str, int] = TimedCache(5.0, load, clock=clock)
        assert await asyncio.gather(*(cache.get("a") for _ in range(3))) == [1, 1, 1]
        assert await cache.get("b") == 2
        clock.now += 4.9
        assert await cache.get("a") == 1
        clock.now += 0.2
        assert await cache.get("a") == 3
        assert asked == ["a", "b", "a"]

    asyncio.run(scenario())


def test_a_failure_is_not_cached() -> None:
    async def scenario() -> None:
        answers = iter([ValueError("no"), 7])

        async def load(_key: None) -> int:
            answer = next(answers)
            if isinstance(answer, ValueError):
                raise answer
            return answer

        cache: TimedCache[None, int] = TimedCache(5.0, load, clock=Clock())
        with pytest.raises(ValueError, match="no"):
            await cache.get(None)
        assert await cache.get(None) == 7

    asyncio.run(scenario())


def test_a_cancelled_caller_does_not_cancel_the_load_for_others() -> None:
    async def scenario() -> None:
        may_answer = asyncio.Event()

        async def load(_key: None) -> int:
            await may_answer.wait()
            return 1

        cache: TimedCache[None, int] = TimedCache(5.0, load, clock=Clock())
        first, second = (asyncio.ensure_future(cache.get(None)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        may_answer.set()
        assert await second == 1

    asyncio.run(scenario())
