"""Reports usage, from the counters in Redis into which the logs were added."""

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from loraserve.control.csv_text import csv_text
from loraserve.control.documents.catalog import Catalog
from loraserve.control.documents.tenant_edits import was_there_since
from loraserve.control.tenancy.principal import Principal
from loraserve.control.unavailable import redis_required
from loraserve.control.usage.metrics import Metric, ttft_bucket
from loraserve.control.usage.shipping import NO_KEY, UsageShipping, adapter_of_counter
from loraserve.live.live_store import LiveStore
from loraserve.live.usage import DAY_S, DAYS_KEPT_S, HOURS_KEPT_S, UsageSum, day_expires_at, hour_expires_at
from loraserve.serving.errors import invalid_value
from loraserve.serving.telemetry.latency_histogram import percentile_ms
from loraserve.store.records import SHARED_TENANT

LATEST = 1e11
"""In the year 5138."""


class Interval(StrEnum):
    HOUR = "hour"
    DAY = "day"
    TOTAL = "total"


class GroupBy(StrEnum):
    TENANT = "tenant"
    KEY = "key"
    ADAPTER = "adapter"
    VERSION = "version"


@dataclass(frozen=True, slots=True)
class UsageQuestion:
    start: float
    """Unix time."""
    end: float
    interval: Interval = Interval.TOTAL
    group_by: frozenset[GroupBy] = frozenset()
    adapter: str | None = None
    """Only adapters of this name; "" = the base model, "shared/<name>" = only the shared one."""
    key_id: str | None = None
    every_tenant: bool = False


@dataclass(slots=True)
class UsageTotals:
    """One row: sums of what the question groups together."""

    start: float
    """Unix time of the hour or day, or of the question."""
    tenant: str | None = None
    key_id: str | None = None
    adapter: str | None = None
    """"" = the base model."""
    version: int | None = None
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    ttft: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def ttft_ms(self, fraction: float) -> float | None:
        return percentile_ms(self.ttft, fraction)

    def count(self, metric: Metric) -> int:
        return self.counts.get(metric.value, 0)


@dataclass(frozen=True, slots=True)
class UsageAnswer:
    rows: list[UsageTotals]
    """In order of time, then of the group's names."""
    is_complete: bool
    """False: Redis had not all of the usage logs yet; the same question will find more."""


class UsageReports:
    """Called on the event loop. A tenant sees only its own requests."""

    def __init__(self, live: LiveStore, catalog: Catalog, shipping: UsageShipping) -> None:
        self._live = live
        self._catalog = catalog
        self._shipping = shipping

    async def answer(self, principal: Principal, question: UsageQuestion) -> UsageAnswer:
        """Raises `ServingError`.

        A key for all tenants (`*`) that acts for `shared` gets the requests of all tenants to the shared adapters.
        """
        _check_span(question)
        tenants = [principal.acting_tenant]
        of_shared = principal.is_any_tenant and principal.acting_tenant == SHARED_TENANT
        if principal.is_any_tenant and (question.every_tenant or of_shared):
            known = self._catalog.known_tenants()
            tenants = sorted(tenant.id for tenant in known if was_there_since(tenant.doc, question.start))
        rows: dict[tuple[object, ...], UsageTotals] = {}
        # So that requests that have just ended count too.
        await self._shipping.ship()
        complete_in = self._shipping.complete_in
        for tenant in tenants:
            for total in await self._read(tenant, question):
                is_of_shared = adapter_of_counter(tenant, total.adapter)[0] == SHARED_TENANT
                if (question.every_tenant or not of_shared or is_of_shared) and _is_visible(principal, tenant, total):
                    _add(rows, tenant, total, question)
        await self._check_view()
        # Meanwhile another task may have filled an emptied Redis with documents, but not yet with usage.
        is_complete = complete_in is not None and complete_in == self._live.view.accepted
        return UsageAnswer([rows[key] for key in sorted(rows, key=_order)], is_complete)

    async def _check_view(self) -> None:
        """Notice if Redis was emptied in between: its counters are not complete."""
        with redis_required():
            await self._live.view.is_current()

    async def _read(self, tenant: str, question: UsageQuestion) -> list[UsageSum]:
        """A total is read from hours if all of them are kept, else from days, which begin before and end after it."""
        by_hour = question.interval is Interval.HOUR or (
            question.interval is Interval.TOTAL
            and question.end - question.start <= HOURS_KEPT_S
            and hour_expires_at(question.start) > time.time()
        )
        read = self._live.usage.hours if by_hour else self._live.usage.days
        with redis_required():
            return await read(tenant, question.start, question.end)


def as_csv(rows: Iterable[UsageTotals]) -> str:
    names = ["start", "tenant", "key_id", "adapter", "version", *(metric.name.lower() for metric in Metric)]
    return csv_text([*names, "ttft_p50_ms", "ttft_p95_ms"], map(_cells, rows))


def _cells(row: UsageTotals) -> list[object]:
    counts = [row.count(metric) for metric in Metric]
    percentiles = [row.ttft_ms(0.5), row.ttft_ms(0.95)]
    return [int(row.start), row.tenant, row.key_id, row.adapter, row.version, *counts, *percentiles]


def _add(rows: dict[tuple[object, ...], UsageTotals], tenant: str, total: UsageSum, question: UsageQuestion) -> None:
    owner, name = adapter_of_counter(tenant, total.adapter)
    adapter = f"{owner}/{name}" if owner != tenant else name
    key_id = None if total.key_id == NO_KEY else total.key_id
    if question.adapter is not None and question.adapter not in (name, adapter):
        return
    if question.key_id is not None and key_id != question.key_id:
        return
    groups = question.group_by
    names = (
        question.start if question.interval is Interval.TOTAL else total.start,
        tenant if GroupBy.TENANT in groups else None,
        key_id if GroupBy.KEY in groups else None,
        adapter if GroupBy.ADAPTER in groups else None,
        total.version if GroupBy.VERSION in groups and adapter else None,
    )
    row = rows.get(names)
    if row is None:
        row = rows[names] = UsageTotals(*names)
    bucket = ttft_bucket(total.metric)
    if bucket is None:
        row.counts[total.metric] += total.amount
    else:
        row.ttft[bucket] += total.amount


def _is_visible(principal: Principal, tenant: str, total: UsageSum) -> bool:
    """A key restricted to some adapters sees those and the base model."""
    name = adapter_of_counter(tenant, total.adapter)[1]
    return not name or principal.may_use(name)


def _order(names: tuple[object, ...]) -> tuple[object, ...]:
    start, *rest = names
    return (start, *("" if name is None else str(name) for name in rest))


def _check_span(question: UsageQuestion) -> None:
    for name, at in (("from", question.start), ("to", question.end)):
        if not 0 <= at <= LATEST:
            raise invalid_value(name, f"is {at:g}; it must be a time in Unix seconds.")
    span_s = question.end - question.start
    if span_s <= 0:
        raise invalid_value("to", "is not after 'from'.")
    by_hour, now = question.interval is Interval.HOUR, time.time()
    kept = f"hourly usage is kept for {HOURS_KEPT_S // DAY_S} days, daily usage for {DAYS_KEPT_S // DAY_S}."
    if (hour_expires_at if by_hour else day_expires_at)(question.start) <= now:
        raise invalid_value("from", f"is {(now - question.start) / DAY_S:.1f} days ago; {kept}")
    if span_s > (HOURS_KEPT_S if by_hour else DAYS_KEPT_S):
        raise invalid_value("to", f"is {span_s / DAY_S:.1f} days after 'from'; {kept}")
