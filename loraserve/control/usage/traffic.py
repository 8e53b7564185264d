"""Use of each adapter in the last 24 hours, for lists."""

import time
from dataclasses import dataclass, field

from loraserve.control.documents.catalog import Catalog
from loraserve.control.documents.tenant_edits import was_there_since
from loraserve.control.pauses import with_pauses
from loraserve.control.tenancy.principal import Principal
from loraserve.control.timed_cache import TimedCache
from loraserve.control.usage.metrics import TTFT_PREFIX, Metric, ttft_bucket
from loraserve.control.usage.request_totals import AdapterKey, RequestTotals
from loraserve.control.usage.shipping import UsageShipping, adapter_of_counter
from loraserve.live.key_names import usage_metrics_glob
from loraserve.live.live_store import LiveStore
from loraserve.live.usage import HOUR_S, UsageSum
from loraserve.live.view import AcceptedView
from loraserve.serving.telemetry.latency_histogram import percentile_ms
from loraserve.store.records import SHARED_TENANT

HOURS = 24
KEEP_S = 30.0
COUNTERS = usage_metrics_glob(f"{Metric.REQUESTS[0]}{TTFT_PREFIX[0]}")


@dataclass(frozen=True, slots=True)
class AdapterTraffic:
    num_requests: int
    ttft_p95_ms: float | None
    last_used_at: float | None
    """Unix time; the beginning of the hour if it was used on another server."""


@dataclass(slots=True)
class _Sums:
    num_requests: int = 0
    ttft: dict[int, int] = field(default_factory=dict)
    """Requests by bucket."""
    last_at: float = 0.0


NO_TRAFFIC = AdapterTraffic(0, None, None)


class UsageTraffic:
    """Called on the event loop. Every method raises `LiveUnavailableError`."""

    def __init__(self, live: LiveStore, catalog: Catalog, totals: RequestTotals, shipping: UsageShipping) -> None:
        self._live = live
        self._catalog = catalog
        self._totals = totals
        self._shipping = shipping
        self._now: TimedCache[str, dict[AdapterKey, AdapterTraffic]] = TimedCache(KEEP_S, self._of_tenant)
        self._shared: TimedCache[None, dict[AdapterKey, AdapterTraffic]] = TimedCache(KEEP_S, self._of_all)
        self._past: dict[str, dict[AdapterKey, _Sums]] = {}
        """Sums of each tenant's hours that are over."""
        self._past_of: tuple[int, AcceptedView | None] = (0, None)
        """The end of those hours, and the Redis they were read from."""

    async def of(self, principal: Principal) -> dict[AdapterKey, AdapterTraffic]:
        """The acting tenant's requests, at most 30 s old; those that a server reported hours late, up to an hour.

        For a key for all tenants (`*`) that acts for `shared`: all tenants' requests to its adapters.
        """
        if principal.acting_tenant == SHARED_TENANT and principal.is_any_tenant:
            return await self._shared.get(None)
        return await self._now.get(principal.acting_tenant)

    async def _of_tenant(self, tenant: str) -> dict[AdapterKey, AdapterTraffic]:
        return await _as_traffic(await self._sums(tenant))

    async def _of_all(self, _key: None) -> dict[AdapterKey, AdapterTraffic]:
        merged: dict[AdapterKey, _Sums] = {}
        for document in self._catalog.known_tenants():
            if was_there_since(document.doc, time.time() - HOURS * HOUR_S):
                await _merge(merged, await self._sums(document.id))
        return await _as_traffic({key: sums for key, sums in merged.items() if key[0] == SHARED_TENANT})

    async def _sums(self, tenant: str) -> dict[AdapterKey, _Sums]:
        this_hour = int(time.time() // HOUR_S) * HOUR_S
        recent = this_hour - HOUR_S
        merged: dict[AdapterKey, _Sums] = {}
        await _merge(merged, await self._past_sums(tenant, this_hour - (HOURS - 1) * HOUR_S, recent))
        await _merge(merged, await self._read(tenant, recent, this_hour + HOUR_S))
        for key, last_at in self._totals.last_used_at(tenant).items():
            if key in merged:
                merged[key].last_at = max(merged[key].last_at, last_at)
        return merged

    async def _past_sums(self, tenant: str, start: int, end: int) -> dict[AdapterKey, _Sums]:
        """Read once an hour: reading a day of 10,000 adapters takes a second. Read again if Redis is rebuilt."""
        of = (end, self._shipping.complete_in)
        if of != self._past_of:
            self._past, self._past_of = {}, of
        sums = self._past.get(tenant)
        if sums is None:
            sums = await self._read(tenant, start, end)
            if of[1] is not None and of == self._past_of:
                self._past[tenant] = sums
        return sums

    async def _read(self, tenant: str, start: int, end: int) -> dict[AdapterKey, _Sums]:
        sums: dict[AdapterKey, _Sums] = {}
        async for page in self._live.usage.hours(tenant, start, end, COUNTERS):
            for total in page:
                _add(sums, tenant, total)
        return sums


def _add(sums: dict[AdapterKey, _Sums], tenant: str, total: UsageSum) -> None:
    key = adapter_of_counter(tenant, total.adapter)
    of = sums.get(key)
    if of is None:
        of = sums[key] = _Sums()
    of.last_at = max(of.last_at, total.start)
    bucket = ttft_bucket(total.metric)
    if bucket is not None:
        of.ttft[bucket] = of.ttft.get(bucket, 0) + total.amount
    elif total.metric == Metric.REQUESTS:
        of.num_requests += total.amount


async def _merge(into: dict[AdapterKey, _Sums], more: dict[AdapterKey, _Sums]) -> None:
    async for key, sums in with_pauses(more.items()):
        of = into.setdefault(key, _Sums())
        of.num_requests += sums.num_requests
        of.last_at = max(of.last_at, sums.last_at)
        for bucket, count in sums.ttft.items():
            of.ttft[bucket] = of.ttft.get(bucket, 0) + count


async def _as_traffic(sums: dict[AdapterKey, _Sums]) -> dict[AdapterKey, AdapterTraffic]:
    return {
        key: AdapterTraffic(of.num_requests, percentile_ms(of.ttft, 0.95), of.last_at)
        async for key, of in with_pauses(sums.items())
    }
