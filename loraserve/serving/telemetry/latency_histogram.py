"""Latencies counted in buckets, so that percentiles can be computed over several processes and intervals."""

from bisect import bisect_left
from collections.abc import Mapping

LATENCY_EDGES_MS: tuple[float, ...] = tuple(round(10 ** (i / 8), 3) for i in range(45))
"""1 ms to 316 s in steps of a third: percentiles are accurate to 15 %. Higher latencies count in the last bucket."""


def bucket_of(latency_ms: float) -> int:
    """Index into `LATENCY_EDGES_MS` of the smallest edge that is not below the latency, or of the last edge."""
    return min(bisect_left(LATENCY_EDGES_MS, latency_ms), len(LATENCY_EDGES_MS) - 1)


def percentile_ms(counts: Mapping[int, int], fraction: float) -> float | None:
    """Percentile of counts by bucket, interpolated logarithmically within the bucket; None if all counts are 0."""
    total = sum(counts.values())
    if total == 0:
        return None
    wanted, seen = fraction * total, 0
    for index in sorted(counts):
        count = counts[index]
        if count and seen + count >= wanted:
            upper = LATENCY_EDGES_MS[index]
            lower = LATENCY_EDGES_MS[index - 1] if index else upper / 2
            return lower * (upper / lower) ** max(0.0, (wanted - seen) / count)
        seen += count
    return LATENCY_EDGES_MS[max(counts)]
