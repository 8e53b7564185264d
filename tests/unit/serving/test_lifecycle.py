import asyncio

import pytest

from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.serving.lifecycle import Lifecycle


def test_draining_refuses_new_sequences_and_waits_for_running_ones() -> None:
    async def run() -> None:
        lifecycle = Lifecycle()
        lifecycle.enter(3)
        lifecycle.begin_drain()
        with pytest.raises(ServingError) as caught:
            lifecycle.enter(1)
        assert caught.value.code is ErrorCode.SERVER_DRAINING
        assert caught.value.retry_after_s
        assert not await lifecycle.wait_idle(0.001)
        lifecycle.exit(3)
        assert await lifecycle.wait_idle(1)
        assert lifecycle.num_sequences == 0

    asyncio.run(run())


def test_is_idle_at_once_if_nothing_runs() -> None:
    async def run() -> None:
        assert await Lifecycle().wait_idle(0.1)

    asyncio.run(run())
