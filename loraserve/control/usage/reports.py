"""Reports usage, from the counters in Redis into which the logs were added."""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from loraserve.control.csv_text import csv_text
from loraserve.control.documents.catalog import Catalog
from loraserve.control.documents.tenant_edits import was_there_since
from loraserve.control.tenancy.principal import Principal
from loraserve.control.unavailable import redis_required
from loraserve.control.usage.metrics import Metric, ttft_bucket
from loraserve.control.usage.shipping import BASE_MODEL, NO_KEY, UsageShipping, adapter_of_counter
from loraserve.live.key_names import usage_glob
from loraserve.live.live_store import LiveStore
from loraserve.live.usage import DAY_S, DAYS_KEPT_S, HOURS_KEPT_S, UsageSum, day_expires_at, hour_expires_at
from loraserve.serving.errors import ServingError, invalid_value
from loraserve.serving.telemetry.latency_histogram import percentile_ms
from loraserve.store.records import SHARED_TENANT

LATEST = 1e11
"""In the year 5138."""
MAX_ROWS = 50_000
"""12 MB of JSON."""


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
        rows = _Rows(principal, question, only_shared=of_shared and not question.every_tenant)
        # So that requests that have just ended count too.
        await self._shipping.ship()
        complete_in = self._shipping.complete_in
        for tenant in tenants:
            with redis_required():
                async for page in self._read(tenant, question):
                    rows.add(tenant, page)
        await self._check_view()
        # Meanwhile another task may have filled an emptied Redis with documents, but not yet with usage.
        is_complete = complete_in is not None and complete_in == self._live.view.accepted
        return UsageAnswer(await asyncio.to_thread(rows.in_order), is_complete)

    async def _check_view(self) -> None:
        """Notice if Redis was emptied in between: its counters are not complete."""
        with redis_required():
            await self._live.view.is_current()

    def _read(self, tenant: str, question: UsageQuestion) -> AsyncIterator[list[UsageSum]]:
        """A total is read from hours if all of them are kept, else from days, which begin before and end after it."""
        by_hour = question.interval is Interval.HOUR or (
            question.interval is Interval.TOTAL
            and question.end - question.start <= HOURS_KEPT_S
            and hour_expires_at(question.start) > time.time()
        )
        read = self._live.usage.hours if by_hour else self._live.usage.days
        # So that Redis does not send the rest: for one adapter of 10,000, a day takes 0.6 s instead of 10.
        adapter = BASE_MODEL if question.adapter == "" else question.adapter
        return read(tenant, question.start, question.end, usage_glob(key_id=question.key_id, adapter=adapter))


_Names = tuple[str | None, str | None, str | None, int | None]
"""Tenant, key id, adapter and version of a row."""


class _Rows:
    """The rows of one answer."""

    def __init__(self, principal: Principal, question: UsageQuestion, *, only_shared: bool) -> None:
        """only_shared: only requests to shared adapters."""
        self._principal = principal
        self._question = question
        self._only_shared = only_shared
        self._by_start: dict[float, dict[_Names, UsageTotals]] = {}
        self._num_rows = 0
        self._found: dict[tuple[str, str, int], UsageTotals | None] = {}
        """The row of each key, adapter and version of a tenant and an hour or day; None = not asked for."""
        self._found_in: tuple[str, float] | None = None
        """That tenant, and the start of that hour or day."""

    def add(self, tenant: str, page: list[UsageSum]) -> None:
        """Raises `ServingError` if there are too many rows."""
        for total in page:
            if self._found_in != (tenant, total.start):
                self._found, self._found_in = {}, (tenant, total.start)
            key = (total.key_id, total.adapter, total.version)
            row = self._found[key] if key in self._found else self._find(tenant, total)
            if row is None:
                continue
            bucket = ttft_bucket(total.metric)
            if bucket is None:
                row.counts[total.metric] += total.amount
            else:
                row.ttft[bucket] += total.amount

    def in_order(self) -> list[UsageTotals]:
        """Takes 0.1 s for 50,000 rows."""
        ordered: list[UsageTotals] = []
        for _, rows in sorted(self._by_start.items()):
            ordered += (rows[names] for names in sorted(rows, key=_order))
        return ordered

    def _find(self, tenant: str, total: UsageSum) -> UsageTotals | None:
        row = self._row(tenant, total) if self._is_asked_for(tenant, total) else None
        self._found[total.key_id, total.adapter, total.version] = row
        return row

    def _is_asked_for(self, tenant: str, total: UsageSum) -> bool:
        owner, name = adapter_of_counter(tenant, total.adapter)
        if self._only_shared and owner != SHARED_TENANT:
            return False
        # A key restricted to some adapters sees those and the base model.
        if name and not self._principal.may_use(name):
            return False
        if self._question.key_id not in (None, None if total.key_id == NO_KEY else total.key_id):
            return False
        return self._question.adapter in (None, name, _shown(tenant, total))

    def _row(self, tenant: str, total: UsageSum) -> UsageTotals:
        groups, adapter = self._question.group_by, _shown(tenant, total)
        key_id = None if total.key_id == NO_KEY else total.key_id
        start = self._question.start if self._question.interval is Interval.TOTAL else total.start
        names = (
            tenant if GroupBy.TENANT in groups else None,
            key_id if GroupBy.KEY in groups else None,
            adapter if GroupBy.ADAPTER in groups else None,
            total.version if GroupBy.VERSION in groups and adapter else None,
        )
        rows = self._by_start.setdefault(start, {})
        row = rows.get(names)
        if row is None:
            self._num_rows += 1
            if self._num_rows > MAX_ROWS:
                raise _too_many_rows(self._question)
            row = rows[names] = UsageTotals(start, *names)
        return row


def _shown(tenant: str, total: UsageSum) -> str:
    """The adapter's name in rows."""
    owner, name = adapter_of_counter(tenant, total.adapter)
    return f"{owner}/{name}" if owner != tenant else name


def as_csv(rows: Iterable[UsageTotals]) -> str:
    names = ["start", "tenant", "key_id", "adapter", "version", *(metric.name.lower() for metric in Metric)]
    return csv_text([*names, "ttft_p50_ms", "ttft_p95_ms"], map(_cells, rows))


def _cells(row: UsageTotals) -> list[object]:
    counts = [row.count(metric) for metric in Metric]
    percentiles = [row.ttft_ms(0.5), row.ttft_ms(0.95)]
    return [int(row.start), row.tenant, row.key_id, row.adapter, row.version, *counts, *percentiles]


def _order(names: _Names) -> tuple[str, ...]:
    return tuple("" if name is None else str(name) for name in names)


def _too_many_rows(question: UsageQuestion) -> ServingError:
    groups = ",".join(group for group in GroupBy if group in question.group_by)
    return invalid_value(
        "group_by",
        f"is {groups}, with interval={question.interval}: that makes more than {MAX_ROWS} rows, the limit. Ask for a "
        "shorter time ('from', 'to'), a longer interval, fewer groups, one adapter or one key.",
    )


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
