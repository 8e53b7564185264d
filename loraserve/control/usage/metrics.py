"""What is counted about requests, by the names of the counters in Redis."""

from enum import StrEnum
from functools import lru_cache

from loraserve.serving.telemetry.latency_histogram import bucket_of

TTFT_PREFIX = "ttft"


class Metric(StrEnum):
    """Short names, because every hour of every adapter stores them."""

    REQUESTS = "n"
    ERRORS = "err"
    PROMPT_TOKENS = "in"
    CACHED_TOKENS = "cached"
    OUTPUT_TOKENS = "out"


def ttft_metric(ttft_ms: float) -> str:
    return f"{TTFT_PREFIX}{bucket_of(ttft_ms)}"


@lru_cache(maxsize=256)
def ttft_bucket(metric: str) -> int | None:
    """None if the metric is not a bucket of the histogram."""
    index = metric.removeprefix(TTFT_PREFIX)
    return int(index) if index != metric and index.isdigit() else None
