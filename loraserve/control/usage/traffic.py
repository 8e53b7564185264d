"""Use of each adapter in the last 24 hours, for lists."""

import time
from collections import Counter
from dataclasses import dataclass, field

from loraserve.control.documents.catalog import Catalog
from loraserve.control.documents.tenant_edits import was_there_since
from loraserve.control.tenancy.principal import Principal
from loraserve.control.timed_cache import TimedCache
from loraserve.control.usage.metrics import Metric, ttft_bucket
from loraserve.control.usage.request_totals import AdapterKey, RequestTotals
from loraserve.control.usage.shipping import adapter_of_counter
from loraserve.live.live_store import LiveStore
from loraserve.live.usage import HOUR_S, UsageSum
from loraserve.serving.telemetry.latency_histogram import percentile_ms
from loraserve.store.records import SHARED_TENANT

HOURS = 24
KEEP_S = 30.0
KEEP_PAST_S = 600.0
"""For hours that are over: only a rebuilt Redis changes them."""


@dataclass(frozen=True, slots=True)
class AdapterTraffic:
    num_requests: int
    ttft_p95_ms: float | None
    last_used_at: float | None
    """Unix time; the beginning of the hour if it was used on another server."""


@dataclass(slots=True)
class _Sums:
    num_requests: int = 0
    ttft: Counter[int] = field(default_factory=Counter)
    last_at: float = 0.0


NO_TRAFFIC = AdapterTraffic(0, None, None)


class UsageTraffic:
    """Called on the event loop. Every method raises `LiveUnavailableError`."""

    def __init__(self, live: LiveStore, catalog: Catalog, totals: RequestTotals) -> None:
        self._live = live
        self._catalog = catalog
        self._totals = totals
        self._now: TimedCache[str, dict[AdapterKey, AdapterTraffic]] = TimedCache(KEEP_S, self._of_tenant)
        self._shared: TimedCache[None, dict[AdapterKey, AdapterTraffic]] = TimedCache(KEEP_S, self._of_all)
        self._past: TimedCache[tuple[str, int], dict[AdapterKey, _Sums]] = TimedCache(KEEP_PAST_S, self._read_hour)

    async def of(self, principal: Principal) -> dict[AdapterKey, AdapterTraffic]:
        """The acting tenant's requests, at most 30 s old.

        For a key for all tenants (`*`) that acts for `shared`: all tenants' requests to its adapters.
        """
        if principal.acting_tenant == SHARED_TENANT and principal.is_any_tenant:
            return await self._shared.get(None)
        return await self._now.get(principal.acting_tenant)

    async def _of_tenant(self, tenant: str) -> dict[AdapterKey, AdapterTraffic]:
        return _as_traffic(await self._sums(tenant))

    async def _of_all(self, _key: None) -> dict[AdapterKey, AdapterTraffic]:
        merged: dict[AdapterKey, _Sums] = {}
        for document in self._catalog.known_tenants():
            if was_there_since(document.doc, time.time() - HOURS * HOUR_S):
                _merge(merged, await self._sums(document.id))
        return _as_traffic({key: sums for key, sums in merged.items() if key[0] == SHARED_TENANT})

    async def _sums(self, tenant: str) -> dict[AdapterKey, _Sums]:
        this_hour = int(time.time() // HOUR_S) * HOUR_S
        merged: dict[AdapterKey, _Sums] = {}
        for hour in range(this_hour - (HOURS - 1) * HOUR_S, this_hour + HOUR_S, HOUR_S):
            is_over = hour < this_hour - HOUR_S
            _merge(merged, await (self._past.get((tenant, hour)) if is_over else self._read_hour((tenant, hour))))
        for key, last_at in self._totals.last_used_at(tenant).items():
            if key in merged:
                merged[key].last_at = max(merged[key].last_at, last_at)
        return merged

    async def _read_hour(self, key: tuple[str, int]) -> dict[AdapterKey, _Sums]:
        tenant, hour = key
        sums: dict[AdapterKey, _Sums] = {}
        async for page in self._live.usage.hours(tenant, hour, hour + HOUR_S):
            for total in page:
                _add(sums, tenant, hour, total)
        return sums


def _add(sums: dict[AdapterKey, _Sums], tenant: str, hour: int, total: UsageSum) -> None:
    owner, name = adapter_of_counter(tenant, total.adapter)
    of = sums.setdefault((owner, name), _Sums(last_at=hour))
    bucket = ttft_bucket(total.metric)
    if bucket is not None:
        of.ttft[bucket] += total.amount
    elif total.metric == Metric.REQUESTS:
        of.num_requests += total.amount


def _merge(into: dict[AdapterKey, _Sums], more: dict[AdapterKey, _Sums]) -> None:
    for key, sums in more.items():
        of = into.setdefault(key, _Sums())
        of.num_requests += sums.num_requests
        of.ttft.update(sums.ttft)
        of.last_at = max(of.last_at, sums.last_at)


def _as_traffic(sums: dict[AdapterKey, _Sums]) -> dict[AdapterKey, AdapterTraffic]:
    return {key: AdapterTraffic(of.num_requests, percentile_ms(of.ttft, 0.95), of.last_at) for key, of in sums.items()}
