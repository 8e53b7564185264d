import asyncio

import pytest

from loraserve.control import background
from loraserve.control.background import Background


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
        async with asyncio.timeout(10):
            await work.stop()

    asyncio.run(run())
    assert caught == ["once"]


def test_stop_returns_if_nothing_was_started() -> None:
    asyncio.run(Background().stop())
