import asyncio

from loraserve.control.pauses import AT_ONCE, with_pauses


def test_other_tasks_run_during_a_long_loop() -> None:
    async def scenario() -> None:
        num_turns = 0

        async def other() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        turns = [num_turns async for _ in with_pauses(range(3 * AT_ONCE))]
        task.cancel()
        assert turns == [0] * AT_ONCE + [1] * AT_ONCE + [2] * AT_ONCE

    asyncio.run(scenario())
