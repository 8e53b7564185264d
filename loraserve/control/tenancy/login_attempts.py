"""Rate limits for failed logins (guessed keys or links) and for too frequent logins, both counted in this process."""

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from loraserve.serving.errors import ErrorCode, ServingError

MAX_FAILURES = 10
WINDOW_S = 60.0
MAX_LOGINS = 300
"""Per key, including links made for it. Each login adds an entry to the audit list, which all tenants share: one key
can add at most 7,200 a day to its 100,000."""
LOGINS_WINDOW_S = 3600.0
MAX_REMEMBERED = 4096
"""Addresses, and likewise keys; above this number, the least recently seen are forgotten."""


class LoginAttempts:
    """A key has 256 random bits, so this only keeps logs and Redis from being flooded."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._failures = _Recent(MAX_FAILURES, WINDOW_S, clock)
        self._logins = _Recent(MAX_LOGINS, LOGINS_WINDOW_S, clock)

    def failed(self, address: str) -> None:
        """Count a failed login. Raises `ServingError` (429) for an address with too many recent failures.

        Not called for correct logins: behind a proxy, many people may share one address.
        """
        wait_s = self._failures.add(address)
        if wait_s > 0:
            message = f"{MAX_FAILURES} logins from your address failed within {WINDOW_S:g} s. Retry in {wait_s} s."
            raise ServingError(ErrorCode.RATE_LIMITED, message, retry_after_s=wait_s)

    def logs_in(self, key_id: str) -> None:
        """Count a login. Raises `ServingError` (429) for a key with too many recent ones."""
        wait_s = self._logins.add(key_id)
        if wait_s > 0:
            message = (
                f"There were {MAX_LOGINS} logins with this key within {LOGINS_WINDOW_S:g} s. Retry in {wait_s} s, stay "
                "logged in, or send the key itself with each request: Authorization: Bearer ls-…"
            )
            raise ServingError(ErrorCode.RATE_LIMITED, message, retry_after_s=wait_s)


class _Recent:
    """Times of recent events, by name."""

    def __init__(self, limit: int, window_s: float, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._window_s = window_s
        self._clock = clock
        self._times: OrderedDict[str, deque[float]] = OrderedDict()

    def add(self, who: str) -> int:
        """Record an event and return 0. At the limit, record nothing and return after how many seconds to retry."""
        now = self._clock()
        times = self._times.setdefault(who, deque())
        self._times.move_to_end(who)
        while times and times[0] <= now - self._window_s:
            times.popleft()
        if len(times) >= self._limit:
            return max(1, math.ceil(times[0] + self._window_s - now))
        times.append(now)
        while len(self._times) > MAX_REMEMBERED:
            self._times.popitem(last=False)
        return 0
