"""What is counted of requests, by the names that counters in Redis have."""

from enum import StrEnum

from loraserve.serving.telemetry.latency_histogram import bucket_of

TTFT_PREFIX = "ttft"


class Metric(StrEnum):
    """Short, since every hour of every adapter has them."""

    REQUESTS = "n"
    ERRORS = "err"
    PROMPT_TOKENS = "in"
    CACHED_TOKENS = "cached"
    OUTPUT_TOKENS = "out"


def ttft_metric(ttft_ms: float) -> str:
    return f"{TTFT_PREFIX}{bucket_of(ttft_ms)}"


def ttft_bucket(metric: str) -> int | None:
    """None for a metric that is no bucket of the histogram."""
    index = metric.removeprefix(TTFT_PREFIX)
    return int(index) if index != metric and index.isdigit() else None
