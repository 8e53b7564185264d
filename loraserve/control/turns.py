"""Per-key locks that exist only while they are held or waited for."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator


class Turns:
    """Called on the event loop."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._num_users: dict[str, int] = {}

    @contextlib.asynccontextmanager
    async def take(self, key: str) -> AsyncGenerator[None]:
        """Callers with the same key take turns, in order of arrival."""
        lock = self._locks.setdefault(key, asyncio.Lock())
        self._num_users[key] = self._num_users.get(key, 0) + 1
        try:
            async with lock:
                yield
        finally:
            self._num_users[key] -= 1
            if self._num_users[key] == 0:
                del self._num_users[key], self._locks[key]
