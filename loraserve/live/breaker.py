"""Prevents callers from waiting for a Redis that does not answer."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

PROBE_EVERY_S = 1.0


@dataclass(slots=True)
class Breaker:
    """Closed: every caller may proceed. Open: one caller per second may, and closes the breaker by succeeding."""

    clock: Callable[[], float] = time.monotonic
    down_since: float | None = None
    """By `clock`; None = closed."""
    reason: str = ""
    _next_probe_at: float = field(default=0.0)

    def seconds_to_wait(self) -> float:
        """0: go ahead; an open breaker returns it to one caller per second."""
        if self.down_since is None:
            return 0.0
        now = self.clock()
        if now < self._next_probe_at:
            return self._next_probe_at - now
        self._next_probe_at = now + PROBE_EVERY_S
        return 0.0

    def succeeded(self) -> None:
        self.down_since = None

    def failed(self, reason: str) -> None:
        now = self.clock()
        if self.down_since is None:
            self.down_since = now
        self._next_probe_at = now + PROBE_EVERY_S
        self.reason = reason
