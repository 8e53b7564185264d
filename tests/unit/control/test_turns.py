import asyncio

import pytest

from loraserve.control.turns import Turns


def test_users_of_one_key_take_turns_in_order_and_leave_no_locks_behind() -> None:
    async def run() -> None:
        turns = Turns()
        order: list[str] = []

        async def work(name: str, key: str) -> None:
            async with turns.take(key):
                order.append(f"{name} begins")
                await asyncio.sleep(0)
                order.append(f"{name} ends")

        await asyncio.gather(work("a", "x"), work("b", "x"), work("c", "x"))
        assert order == [f"{name} {what}" for name in "abc" for what in ("begins", "ends")]
        assert not turns._locks
        assert not turns._num_users

    asyncio.run(run())


def test_different_keys_do_not_block_each_other_and_errors_release_them() -> None:
    async def fail(turns: Turns) -> None:
        async with turns.take("x"), turns.take("y"):
            raise ValueError("broken")

    async def run() -> None:
        turns = Turns()
        with pytest.raises(ValueError, match="broken"):
            await fail(turns)
        async with turns.take("x"):
            pass
        assert not turns._locks

    asyncio.run(run())
