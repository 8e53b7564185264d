"""A short-lived cache for answers that many callers request at once."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

CLEAN_ABOVE = 1024
"""Entries."""


class TimedCache(Generic[K, V]):
    """Called on the event loop. Callers of a key that is being loaded share that load; failures are not kept."""

    def __init__(
        self, keep_s: float, load: Callable[[K], Awaitable[V]], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._keep_s = keep_s
        self._load = load
        self._clock = clock
        self._entries: dict[K, tuple[float, asyncio.Future[V]]] = {}

    async def get(self, key: K) -> V:
        """At most `keep_s` old."""
        found = self._entries.get(key)
        if found is None or self._clock() >= found[0]:
            if len(self._entries) >= CLEAN_ABOVE:
                self._forget_old()
            found = (self._clock() + self._keep_s, asyncio.ensure_future(self._load(key)))
            self._entries[key] = found
        task = found[1]
        try:
            return await asyncio.shield(task)
        except BaseException:
            if task.done() and self._entries.get(key) == found:
                del self._entries[key]
            raise

    def _forget_old(self) -> None:
        now = self._clock()
        self._entries = {key: entry for key, entry in self._entries.items() if now < entry[0]}
