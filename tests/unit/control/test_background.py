import asyncio

import pytest

from loraserve.control import background
from loraserve.control.background import Background, Tasks


def test_work_that_swallows_one_cancellation_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "RECANCEL_AFTER_S", 0.01)
    caught: list[str] = []

    async def stubborn() -> None:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            caught.append("once")
        await asyncio.sleep(600)

    async def run() -> None:
        work = Background()
        work.run("stubborn", stubborn)
        work.run("usual", lambda: asyncio.sleep(600))
        await asyncio.sleep(0)
        async with asyncio.timeout(30):
            await work.stop()

    asyncio.run(run())
    assert caught == ["once"]


def test_stop_returns_if_nothing_was_started() -> None:
    asyncio.run(Background().stop())


def test_tasks_are_waited_for_with_those_that_they_start() -> None:
    ended: list[str] = []

    async def run() -> None:
        tasks = Tasks()

        async def second() -> None:
            await asyncio.sleep(0)
            ended.append("second")

        async def first() -> None:
            await asyncio.sleep(0)
            tasks.start(second())
            ended.append("first")

        tasks.start(first())
        await tasks.wait()

    asyncio.run(run())
    assert ended == ["first", "second"]


def test_cancelled_tasks_are_over_after_waiting() -> None:
    async def run() -> None:
        tasks = Tasks()
        tasks.start(asyncio.sleep(600))
        tasks.cancel()
        async with asyncio.timeout(30):
            await tasks.wait()

    asyncio.run(run())
