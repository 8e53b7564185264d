"""Locks by key, which exist only while someone holds them or waits for them."""

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
        """Holders of one key come one after another, in order of arrival."""
        lock = self._locks.setdefault(key, asyncio.Lock())
        self._num_users[key] = self._num_users.get(key, 0) + 1
        try:
            async with lock:
                yield
        finally:
            self._num_users[key] -= 1
            if self._num_users[key] == 0:
                del self._num_users[key], self._locks[key]
