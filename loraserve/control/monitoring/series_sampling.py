"""Writes a sample for this server's engine every 10 seconds, and one for each tenant that had requests."""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable

import msgspec

from loraserve.control.monitoring.series_records import SeriesSample, one_after_another, tenant_sample
from loraserve.control.usage.request_totals import RequestTotals
from loraserve.live.errors import LiveUnavailableError
from loraserve.live.live_store import LiveStore
from loraserve.live.series import Interval, Sample
from loraserve.serving.runtime import Runtime


def tenant_series(engine: str, tenant: str) -> str:
    """Unambiguous: no engine's id contains an @."""
    return f"{engine}@{tenant}"


class SeriesSampling:
    """Called on the event loop. Samples that could not be written leave a gap."""

    def __init__(
        self,
        live: LiveStore,
        runtime: Runtime,
        totals: RequestTotals,
        engine: str,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._live = live
        self._runtime = runtime
        self._totals = totals
        self._engine = engine
        self._clock = clock
        self._before = runtime.engine.stats
        self._sampled_at = clock()
        self._minute: dict[str, list[SeriesSample]] = {}
        """Fine samples by series, since the last coarse sample."""

    async def run(self) -> None:
        """Until cancelled, at multiples of 10 s."""
        while True:
            await asyncio.sleep(Interval.FINE - self._clock() % Interval.FINE)
            with contextlib.suppress(LiveUnavailableError):
                await self.sample()

    async def sample(self) -> None:
        """Write what happened since the last one. Raises `LiveUnavailableError`."""
        now = self._clock()
        at = math.floor(now / Interval.FINE + 0.5) * Interval.FINE
        duration_s, self._sampled_at = max(now - self._sampled_at, 1e-3), now
        totals = self._totals.take()
        num_requests = sum(tenant.num_requests for tenant in totals.values())
        fine = {self._engine: self._engine_sample(duration_s, num_requests)}
        for tenant, of_tenant in totals.items():
            fine[tenant_series(self._engine, tenant)] = tenant_sample(of_tenant, duration_s)
        for series, sample in fine.items():
            self._minute.setdefault(series, []).append(sample)
        coarse: dict[str, SeriesSample] = {}
        if at % Interval.COARSE == 0:
            coarse = {series: one_after_another(samples) for series, samples in self._minute.items()}
            self._minute.clear()
        for interval, samples in ((Interval.FINE, fine), (Interval.COARSE, coarse)):
            for series, sample in samples.items():
                body = msgspec.Raw(msgspec.json.encode(sample))
                await self._live.series.append(interval, Sample(engine=series, at=at, body=body))

    def _engine_sample(self, duration_s: float, num_requests: int) -> SeriesSample:
        runtime = self._runtime
        stats, before = runtime.engine.stats, self._before
        self._before = stats
        measured = runtime.metrics.latencies.take()
        return SeriesSample(
            duration_s=duration_s,
            num_requests=num_requests,
            num_errors=measured.num_errors,
            prompt_tokens=stats.num_prompt_tokens - before.num_prompt_tokens,
            output_tokens=stats.num_generation_tokens - before.num_generation_tokens,
            cache_queries=stats.prefix_cache_queries - before.prefix_cache_queries,
            cache_hits=stats.prefix_cache_hits - before.prefix_cache_hits,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            kv_used_blocks=stats.num_blocks - stats.num_free_blocks - stats.num_cached_blocks,
            kv_blocks=stats.num_blocks,
            arena_used_bytes=stats.arena_used_bytes,
            arena_size_bytes=stats.arena_size_bytes,
            num_adapter_loads=stats.num_adapter_loads - before.num_adapter_loads,
            num_adapter_evictions=stats.num_adapter_evictions - before.num_adapter_evictions,
            ttft=dict(measured.ttft),
            itl=dict(measured.itl),
        )
