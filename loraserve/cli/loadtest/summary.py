"""Figures of a set of requests."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from loraserve.cli.loadtest.client import RequestResult


class Percentiles(msgspec.Struct, frozen=True):
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Summary(msgspec.Struct, frozen=True):
    """Figures of one model's requests, or of all. Times are those of successful requests; None if there are none."""

    num_requests: int
    num_failed: int
    errors: dict[str, int]
    """Failure code → number of requests."""
    prompt_tokens: int
    cached_tokens: int | None
    """Prompt tokens found in the prefix cache; None if the server does not report them."""
    output_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    ttft_ms: Percentiles | None
    itl_ms: Percentiles | None
    tpot_ms: Percentiles | None
    e2e_ms: Percentiles | None


def summarize(results: Sequence[RequestResult], wall_s: float) -> Summary:
    good = [result for result in results if result.failure is None]
    prompt_tokens = sum(result.prompt_tokens for result in good)
    output_tokens = sum(result.output_tokens for result in good)
    cached_tokens = [result.cached_tokens for result in good if result.cached_tokens is not None]
    return Summary(
        num_requests=len(results),
        num_failed=len(results) - len(good),
        errors=dict(Counter(result.failure.code for result in results if result.failure)),
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(cached_tokens) if cached_tokens else None,
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / wall_s,
        total_tokens_per_s=(prompt_tokens + output_tokens) / wall_s,
        requests_per_s=len(good) / wall_s,
        ttft_ms=percentiles_ms(result.ttft_s for result in good),
        itl_ms=percentiles_ms(gap_s for result in good for gap_s in result.gaps_s),
        tpot_ms=percentiles_ms(result.tpot_s for result in good),
        e2e_ms=percentiles_ms(result.e2e_s for result in good),
    )


def percentiles_ms(values_s: Iterable[float | None]) -> Percentiles | None:
    values = sorted(value * 1000 for value in values_s if value is not None)
    if not values:
        return None
    return Percentiles(
        mean=sum(values) / len(values),
        p50=_percentile(values, 0.50),
        p90=_percentile(values, 0.90),
        p99=_percentile(values, 0.99),
        max=values[-1],
    )


def _percentile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank: the smallest value that at least this share of all values does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
