"""Serving while Redis is gone: for a while, for documents it confirmed, within limits counted in this process."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from loraserve.store.records import DocumentKind, Limits

CONFIRMED_WITHIN_S = 60.0
MINUTE_S = 60.0
LOG_INTERVAL_S = 10.0
"""Minimum interval: a Redis that comes and goes must not fill the log."""

logger = logging.getLogger(__name__)

DocumentRef = tuple[DocumentKind, str]


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


@dataclass(frozen=True, slots=True)
class LocalRefusal:
    kind: DocumentKind
    """Whose limit: a tenant's or a key's."""
    measure: str
    """ "requests", "tokens" or "concurrent"."""
    limit: int
    retry_s: float | None
    """None: never, because the limit is 0."""


class _Bucket:
    """`limit` per minute, full at first; may go into debt if a reservation was too small."""

    def __init__(self, limit: int, now_s: float) -> None:
        self.limit = limit
        self.level = float(limit)
        self._at_s = now_s

    def refill(self, now_s: float) -> None:
        self.level = min(self.limit, self.level + (now_s - self._at_s) * self.limit / MINUTE_S)
        self._at_s = now_s

    def wait_s(self, amount: int) -> float:
        """Seconds until `amount` can be taken; more than a whole bucket waits for a full one."""
        missing = min(amount, self.limit) - self.level
        return max(0.0, missing * MINUTE_S / self.limit)


class LocalLimits:
    """The limits of keys and tenants, counted in this process only."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[tuple[DocumentRef, str], _Bucket] = {}

    def try_take(self, scopes: list[tuple[DocumentRef, Limits, int]], tokens: int) -> LocalRefusal | None:
        """scopes: with limits and requests in flight. Takes from all of them, or from none and returns why."""
        now_s = self._clock()
        wanted: list[tuple[_Bucket, int]] = []
        for ref, limits, num_in_flight in scopes:
            if limits.max_concurrent is not None and num_in_flight >= limits.max_concurrent:
                return LocalRefusal(ref[0], "concurrent", limits.max_concurrent, 1.0 if limits.max_concurrent else None)
            for measure, limit, amount in (
                ("requests", limits.requests_per_min, 1),
                ("tokens", limits.tokens_per_min, tokens),
            ):
                if limit is None:
                    continue
                if limit <= 0:
                    return LocalRefusal(ref[0], measure, limit, None)
                bucket = self._bucket(ref, measure, limit, now_s)
                wait_s = bucket.wait_s(amount)
                if wait_s > 0:
                    return LocalRefusal(ref[0], measure, limit, wait_s)
                wanted.append((bucket, amount))
        for bucket, amount in wanted:
            bucket.level -= amount
        return None

    def give_back(self, refs: list[DocumentRef], unused_tokens: int) -> None:
        """unused_tokens: negative if more was used than reserved."""
        for ref in refs:
            bucket = self._buckets.get((ref, "tokens"))
            if bucket is not None:
                bucket.level = min(bucket.limit, bucket.level + unused_tokens)

    def _bucket(self, ref: DocumentRef, measure: str, limit: int, now_s: float) -> _Bucket:
        bucket = self._buckets.get((ref, measure))
        if bucket is None or bucket.limit != limit:
            bucket = self._buckets[ref, measure] = _Bucket(limit, now_s)
        bucket.refill(now_s)
        return bucket
