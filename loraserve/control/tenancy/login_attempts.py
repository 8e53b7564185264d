"""Slows down whoever guesses keys or links, and whoever logs in all the time: both in this process."""

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from loraserve.serving.errors import ErrorCode, ServingError

MAX_FAILURES = 10
WINDOW_S = 60.0
MAX_LOGINS = 300
"""Of one key, with the links made for it. Each is an entry of the audit list, which all tenants share: at most 7,200 a
day of its 100,000."""
LOGINS_WINDOW_S = 3600.0
MAX_REMEMBERED = 4096
"""Addresses, and keys: the least recently seen are forgotten beyond that."""


class LoginAttempts:
    """A key has 256 random bits, so this only keeps logs and Redis from being flooded."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._failures = _Recent(MAX_FAILURES, WINDOW_S, clock)
        self._logins = _Recent(MAX_LOGINS, LOGINS_WINDOW_S, clock)

    def failed(self, address: str) -> None:
        """Raises `ServingError` (429) for an address with too many recent failures.

        One that is right is not asked for: behind a proxy, many people may come from one address.
        """
        wait_s = self._failures.add(address)
        if wait_s > 0:
            message = f"{MAX_FAILURES} logins from your address failed within {WINDOW_S:g} s. Retry in {wait_s} s."
            raise ServingError(ErrorCode.RATE_LIMITED, message, retry_after_s=wait_s)

    def logs_in(self, key_id: str) -> None:
        """Raises `ServingError` (429) for a key with too many recent logins."""
        wait_s = self._logins.add(key_id)
        if wait_s > 0:
            message = (
                f"There were {MAX_LOGINS} logins with this key within {LOGINS_WINDOW_S:g} s. Retry in {wait_s} s, stay "
                "logged in, or send the key itself with each request: Authorization: Bearer ls-…"
            )
            raise ServingError(ErrorCode.RATE_LIMITED, message, retry_after_s=wait_s)


class _Recent:
    """What each did in the last seconds."""

    def __init__(self, limit: int, window_s: float, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._window_s = window_s
        self._clock = clock
        self._times: OrderedDict[str, deque[float]] = OrderedDict()

    def add(self, who: str) -> int:
        """0, or after how many seconds it is possible again; then it was not added."""
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
