"""One step of a chart, as kept in Redis for each engine and each tenant."""

from collections import Counter
from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from loraserve.control.usage.request_totals import TenantTotals


class SeriesSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sums of events over the step, and means of levels. Buckets are those of `latency_histogram`."""

    duration_s: float
    num_requests: int = 0
    """Requests that ended."""
    num_errors: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cache_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    cache_hits: int = 0
    num_running: float = 0.0
    num_waiting: float = 0.0
    kv_used_blocks: float = 0.0
    kv_blocks: int = 0
    """0 = unknown."""
    arena_used_bytes: float = 0.0
    arena_size_bytes: int = 0
    num_adapter_loads: int = 0
    """Into the adapter memory."""
    num_adapter_evictions: int = 0
    ttft: dict[int, int] = {}
    itl: dict[int, int] = {}


def tenant_sample(totals: TenantTotals, duration_s: float) -> SeriesSample:
    return SeriesSample(
        duration_s=duration_s,
        num_requests=totals.num_requests,
        num_errors=totals.num_errors,
        prompt_tokens=totals.num_prompt_tokens,
        output_tokens=totals.num_output_tokens,
        cache_queries=totals.num_prompt_tokens,
        cache_hits=totals.num_cached_tokens,
        ttft=dict(totals.ttft),
    )


def side_by_side(samples: list[SeriesSample]) -> SeriesSample:
    """All engines together, in the same step."""
    return SeriesSample(
        duration_s=max(sample.duration_s for sample in samples),
        num_requests=sum(sample.num_requests for sample in samples),
        num_errors=sum(sample.num_errors for sample in samples),
        prompt_tokens=sum(sample.prompt_tokens for sample in samples),
        output_tokens=sum(sample.output_tokens for sample in samples),
        cache_queries=sum(sample.cache_queries for sample in samples),
        cache_hits=sum(sample.cache_hits for sample in samples),
        num_running=sum(sample.num_running for sample in samples),
        num_waiting=sum(sample.num_waiting for sample in samples),
        kv_used_blocks=sum(sample.kv_used_blocks for sample in samples),
        kv_blocks=sum(sample.kv_blocks for sample in samples),
        arena_used_bytes=sum(sample.arena_used_bytes for sample in samples),
        arena_size_bytes=sum(sample.arena_size_bytes for sample in samples),
        num_adapter_loads=sum(sample.num_adapter_loads for sample in samples),
        num_adapter_evictions=sum(sample.num_adapter_evictions for sample in samples),
        ttft=_added(sample.ttft for sample in samples),
        itl=_added(sample.itl for sample in samples),
    )


def one_after_another(samples: list[SeriesSample]) -> SeriesSample:
    """A longer step, merged from consecutive ones of one engine or tenant."""
    count = len(samples)
    total = side_by_side(samples)
    return replace(
        total,
        duration_s=sum(sample.duration_s for sample in samples),
        num_running=total.num_running / count,
        num_waiting=total.num_waiting / count,
        kv_used_blocks=total.kv_used_blocks / count,
        kv_blocks=max(sample.kv_blocks for sample in samples),
        arena_used_bytes=total.arena_used_bytes / count,
        arena_size_bytes=max(sample.arena_size_bytes for sample in samples),
    )


def _added(histograms: Iterable[dict[int, int]]) -> dict[int, int]:
    total: Counter[int] = Counter()
    for histogram in histograms:
        total.update(histogram)
    return dict(total)
