"""Slows down whoever guesses keys or links: failures per address, in this process."""

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from loraserve.serving.errors import ErrorCode, ServingError

MAX_FAILURES = 10
WINDOW_S = 60.0
MAX_ADDRESSES = 4096
"""The least recently seen are forgotten beyond that."""


class LoginAttempts:
    """A key has 256 random bits, so this only keeps logs and Redis from being flooded."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()

    def failed(self, address: str) -> None:
        """Raises `ServingError` (429) for an address with too many recent failures.

        One that is right is not asked for: behind a proxy, many people may come from one address.
        """
        failures = self._recent(address)
        if len(failures) >= MAX_FAILURES:
            retry_s = math.ceil(failures[0] + WINDOW_S - self._clock())
            message = f"{MAX_FAILURES} logins from your address failed within {WINDOW_S:g} s. Retry in {retry_s} s."
            raise ServingError(ErrorCode.RATE_LIMITED, message, retry_after_s=max(1, retry_s))
        failures.append(self._clock())
        self._failures[address] = failures
        self._failures.move_to_end(address)
        while len(self._failures) > MAX_ADDRESSES:
            self._failures.popitem(last=False)

    def _recent(self, address: str) -> deque[float]:
        failures = self._failures.get(address, deque())
        while failures and failures[0] <= self._clock() - WINDOW_S:
            failures.popleft()
        return failures
