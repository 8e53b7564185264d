"""Serving while Redis is gone: for a while, for documents it confirmed."""

import logging
import time
from collections.abc import Callable

from loraserve.store.records import DocumentRef

CONFIRMED_WITHIN_S = 60.0
LOG_INTERVAL_S = 10.0
"""Minimum interval: a Redis that comes and goes must not fill the log."""

logger = logging.getLogger(__name__)


class Outage:
    """Since when Redis is gone, which documents it confirmed shortly before, and whether it is full."""

    def __init__(self, grace_s: float = 60.0, *, clock: Callable[[], float] = time.monotonic) -> None:
        """grace_s: 0 = refuse as soon as Redis is gone."""
        self._grace_s = grace_s
        self._clock = clock
        self._began_s: float | None = None
        self._is_logged = False
        """Whether this outage was logged."""
        self._logged_s = float("-inf")
        self._confirmed_s: dict[DocumentRef, float] = {}
        self.is_full = False
        """As of its last answer. While full, requests are admitted but nothing can be changed."""

    @property
    def began_s(self) -> float | None:
        """By `clock`; None = Redis is reachable."""
        return self._began_s

    def failed(self, reason: object) -> None:
        """Redis did not answer. Logged once per outage, whichever caller notices it first."""
        now_s = self._clock()
        if self._began_s is None:
            self._began_s = now_s
            self._is_logged = False
        if not self._is_logged and now_s - self._logged_s >= LOG_INTERVAL_S:
            self._is_logged, self._logged_s = True, now_s
            logger.warning("Redis is not reachable: %s", reason)

    def succeeded(self) -> None:
        """Redis answered."""
        if self._began_s is not None and self._is_logged:
            logger.warning("Redis is reachable again after %.0f s", self._clock() - self._began_s)
        self._began_s = None

    def confirm(self, refs: list[DocumentRef]) -> None:
        """Redis has just confirmed that our revisions of these are current."""
        now_s = self._clock()
        for ref in refs:
            self._confirmed_s[ref] = now_s

    def allows(self, refs: list[DocumentRef]) -> bool:
        """Whether a request that depends on these documents may run without Redis."""
        if self._began_s is None or self._grace_s <= 0 or self._clock() - self._began_s > self._grace_s:
            return False
        oldest_s = self._began_s - CONFIRMED_WITHIN_S
        return all(self._confirmed_s.get(ref, float("-inf")) >= oldest_s for ref in refs)
