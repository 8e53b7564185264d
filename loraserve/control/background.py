"""Background work that runs as long as the server."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

RETRY_S = 1.0
RECANCEL_AFTER_S = 2.0

logger = logging.getLogger(__name__)


class Background:
    """Called on the event loop. Work that fails unexpectedly is logged and restarted."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    def run(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Run until `stop`; work that returns is not restarted."""
        self._tasks.append(asyncio.create_task(_persist(name, work), name=name))

    def every(self, name: str, interval_s: float, work: Callable[[], Awaitable[object]]) -> None:
        """The first call comes after one interval."""

        async def repeat() -> None:
            while True:
                await asyncio.sleep(interval_s)
                await work()

        self.run(name, repeat)

    async def stop(self) -> None:
        await cancelled(self._tasks)


class Tasks:
    """Work that goes on after its caller has returned, and ends by itself. Called on the event loop."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()
        """asyncio keeps only weak references."""

    def start(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def cancel(self) -> None:
        for task in self._running:
            task.cancel()

    async def wait(self) -> None:
        """Until all of it has ended, including what it started."""
        while self._running:
            await asyncio.wait(self._running)


async def cancelled(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Return once all tasks have ended. Cancellation is repeated until then: a library may swallow one by mistake."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=RECANCEL_AFTER_S)


async def _persist(name: str, work: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            return await work()
        except Exception:
            logger.exception("%s failed and will be restarted", name)
            await asyncio.sleep(RETRY_S)
