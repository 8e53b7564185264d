"""Everything that reports on the server and on past actions. Built once, next to the parts it observes."""

import asyncio
import contextlib
import time
from dataclasses import dataclass
from datetime import UTC, datetime

from loraserve.control.background import Background
from loraserve.control.contents.names import ContentNames
from loraserve.control.contents.residency import Residency
from loraserve.control.declared import Declared
from loraserve.control.monitoring.live_views import LiveViews
from loraserve.control.monitoring.series_reports import SeriesReports
from loraserve.control.monitoring.series_sampling import SeriesSampling
from loraserve.control.monitoring.server_metrics import ServerMetrics
from loraserve.control.requests.admission import Admission
from loraserve.control.requests.lost import LostRequests
from loraserve.control.requests.running import RunningRequests
from loraserve.control.requests.service import RequestService
from loraserve.control.requests.snapshots import Snapshots
from loraserve.control.tenancy.audit_trail import AuditTrail
from loraserve.control.tenancy.refusals import Refusals
from loraserve.control.usage.reports import UsageReports
from loraserve.control.usage.shipping import UsageShipping
from loraserve.control.usage.traffic import UsageTraffic
from loraserve.control.usage.writer import UsageWriter
from loraserve.live.errors import LiveUnavailableError
from loraserve.serving.runtime import Runtime
from loraserve.store.documents import DocumentStore
from loraserve.store.engine_slots import EngineSlot
from loraserve.store.usage_files import remove_old_logs

SHIP_EVERY_S = 1.0
SWEEP_LOST_EVERY_S = 5.0
RETENTION_AFTER_S = 60.0
"""Delay after the start, to stay out of the way of start-up."""
RETENTION_EVERY_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Observer:
    """Called on the event loop."""

    declared: Declared
    slot: EngineSlot
    snapshots: Snapshots
    live_views: LiveViews
    sampling: SeriesSampling
    series: SeriesReports
    requests: RequestService
    lost: LostRequests
    shipping: UsageShipping
    usage: UsageReports
    traffic: UsageTraffic
    audit: AuditTrail
    refusals: Refusals
    metrics: ServerMetrics

    def start(self, background: Background) -> None:
        background.run("publishing snapshots", self.snapshots.run)
        background.run("sampling for charts", self.sampling.run)
        background.every("shipping usage", SHIP_EVERY_S, self.shipping.ship)
        background.every("writing off lost requests", SWEEP_LOST_EVERY_S, self.lost.sweep)
        background.run("removing old logs and revisions", self._retain)
        background.run("measuring disk space", self.metrics.run)

    async def close(self) -> None:
        """Call after the background work was stopped."""
        await self.refusals.close()
        with contextlib.suppress(LiveUnavailableError):
            await self.snapshots.withdraw()
        await self.shipping.ship()
        self.slot.release()

    async def _retain(self) -> None:
        await asyncio.sleep(RETENTION_AFTER_S)
        while True:
            await asyncio.to_thread(self._remove_old)
            await asyncio.sleep(RETENTION_EVERY_S)

    def _remove_old(self) -> None:
        data_dir = self.declared.settings.data_dir
        remove_old_logs(data_dir, datetime.fromtimestamp(time.time(), UTC).strftime("%Y%m%d"))
        DocumentStore(data_dir).prune()


def build_observer(
    declared: Declared,
    runtime: Runtime,
    admission: Admission,
    running: RunningRequests,
    residency: Residency,
    usage: UsageWriter,
    process: str,
) -> Observer:
    live, catalog, data_dir = declared.live, declared.catalog, declared.settings.data_dir
    slot = EngineSlot(data_dir)
    snapshots = Snapshots(live, runtime, running, residency, admission.unsettled, process=process, engine=slot.engine)
    shipping = UsageShipping(data_dir, live)
    metrics = ServerMetrics(data_dir, declared.outage, usage)
    runtime.metrics.add(metrics)
    return Observer(
        declared=declared,
        slot=slot,
        snapshots=snapshots,
        live_views=LiveViews(snapshots, ContentNames(catalog), declared.outage),
        sampling=SeriesSampling(live, runtime, admission.totals, slot.engine),
        series=SeriesReports(live, data_dir),
        requests=RequestService(catalog, live, snapshots),
        lost=LostRequests(live, snapshots),
        shipping=shipping,
        usage=UsageReports(live, catalog, shipping),
        traffic=UsageTraffic(live, catalog, admission.totals, shipping),
        audit=AuditTrail(live, DocumentStore(data_dir)),
        refusals=Refusals(live),
        metrics=metrics,
    )
