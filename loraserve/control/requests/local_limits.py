"""The limits of keys and tenants while Redis is gone, counted in this process only."""

import time
from collections.abc import Callable

from loraserve.live.admission_records import Limited, Measure, Scope
from loraserve.store.records import DocumentKind, DocumentRef, Limits

MINUTE_S = 60.0


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
    """Called on the event loop. Requests and tokens per minute refill continuously."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[tuple[DocumentRef, Measure], _Bucket] = {}

    def try_take(self, scopes: list[tuple[DocumentRef, Limits, int]], tokens: int) -> Limited | None:
        """scopes: with limits and requests in flight. Takes from all of them, or from none and returns why."""
        now_s = self._clock()
        wanted: list[tuple[_Bucket, int]] = []
        for ref, limits, num_in_flight in scopes:
            if limits.max_concurrent is not None and num_in_flight >= limits.max_concurrent:
                return _limited(ref, Measure.CONCURRENT, limits.max_concurrent, 1.0)
            for measure, limit, amount in (
                (Measure.REQUESTS, limits.requests_per_min, 1),
                (Measure.TOKENS, limits.tokens_per_min, tokens),
            ):
                if limit is None:
                    continue
                if limit <= 0:
                    return _limited(ref, measure, limit, 0.0)
                bucket = self._bucket(ref, measure, limit, now_s)
                wait_s = bucket.wait_s(amount)
                if wait_s > 0:
                    return _limited(ref, measure, limit, wait_s)
                wanted.append((bucket, amount))
        for bucket, amount in wanted:
            bucket.level -= amount
        return None

    def give_back(self, refs: list[DocumentRef], unused_tokens: int) -> None:
        """unused_tokens: negative if more was used than reserved."""
        for ref in refs:
            bucket = self._buckets.get((ref, Measure.TOKENS))
            if bucket is not None:
                bucket.level = min(bucket.limit, bucket.level + unused_tokens)

    def _bucket(self, ref: DocumentRef, measure: Measure, limit: int, now_s: float) -> _Bucket:
        bucket = self._buckets.get((ref, measure))
        if bucket is None or bucket.limit != limit:
            bucket = self._buckets[ref, measure] = _Bucket(limit, now_s)
        bucket.refill(now_s)
        return bucket


def _limited(ref: DocumentRef, measure: Measure, limit: int, retry_s: float) -> Limited:
    """With a limit of 0, waiting does not help."""
    scope = Scope.TENANT if ref[0] is DocumentKind.TENANT else Scope.KEY
    return Limited(scope=scope, measure=measure, limit=limit, retry_ms=int(retry_s * 1000) if limit > 0 else None)
