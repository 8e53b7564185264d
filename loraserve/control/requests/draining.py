"""Waits until a deleted adapter, or what a deleted tenant owned, is out of use: no request on any server, and no engine
that has the contents."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping

from loraserve.control.contents.residency import Residency
from loraserve.control.documents.adapter_edits import versions_of
from loraserve.control.documents.catalog import Catalog
from loraserve.control.requests.other_servers import OtherServers
from loraserve.control.requests.running import RunningRequests
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.records import AdapterDoc, adapter_id

ACK_WAIT_S = 5.0
"""How long a deletion waits for other servers to abort overdue requests, and then for engines to unload."""
POLL_OTHERS_EVERY_S = 0.2


class Draining:
    """Called on the event loop.

    NOTE: requests are counted by adapter, not by content, because another adapter may have the same content.
    """

    def __init__(self, catalog: Catalog, running: RunningRequests, residency: Residency, others: OtherServers) -> None:
        self._catalog = catalog
        self._running = running
        self._residency = residency
        self._others = others

    def is_in_use(self, doc: AdapterDoc) -> bool:
        """Whether it is still in use on this server, whatever others do."""
        return self._running.uses(doc.tenant, doc.name) or any(
            not self._residency.has_forgotten(digest) for digest in self._gone(doc)
        )

    async def finish(self, doc: AdapterDoc, drain_s: float) -> bool:
        """Whether its requests have ended and the engines have unloaded it: see `ACK_WAIT_S`.

        doc: as deleted. Requests that still run here after `drain_s` are aborted; other servers do the same by
        themselves. Nothing is aborted if it was restored in between or its name was used again.
        """
        since = await self._others.last_report_times()
        overdue_s = time.monotonic() + drain_s + ACK_WAIT_S
        if not await self._running.wait_while(lambda: self._running.uses(doc.tenant, doc.name), drain_s):
            if not self._is_still_deleted(doc):
                return False
            for request in self._running.of_adapter(doc.tenant, doc.name):
                request.abort(adapter_deleted(doc.name))
        adapter = adapter_id(doc.tenant, doc.name)
        if not await _ends(lambda: self._others.any_runs(adapter, since), overdue_s):
            return False
        if not await self._is_unloaded(self._gone(doc), since):
            return False
        return not self._running.uses(doc.tenant, doc.name)

    def is_tenant_in_use(self, tenant: str, adapters: Iterable[AdapterDoc]) -> bool:
        """As `is_in_use`, for a deleted tenant. adapters: all that it owned."""
        return self._running.has_any_of(tenant) or any(self.is_in_use(doc) for doc in adapters)

    async def finish_tenant(self, tenant: str, adapters: Collection[AdapterDoc]) -> bool:
        """As `finish`, for a deleted tenant, whose requests are being aborted. adapters: all that it owned."""
        since = await self._others.last_report_times()
        deadline_s = time.monotonic() + ACK_WAIT_S
        if not await self._running.wait_while(lambda: self._running.has_any_of(tenant), ACK_WAIT_S):
            return False
        if not await _ends(lambda: self._others.any_serves(tenant, since), deadline_s):
            return False
        gone = {digest for doc in adapters for digest in self._gone(doc)}
        return await self._is_unloaded(gone, since) and not self._running.has_any_of(tenant)

    async def _is_unloaded(self, digests: set[str], since: Mapping[str, float]) -> bool:
        """Whether no engine has these contents any more, within `ACK_WAIT_S`."""
        deadline_s = time.monotonic() + ACK_WAIT_S
        if not await self._residency.wait_unloaded(digests, ACK_WAIT_S):
            return False
        return await _ends(lambda: self._others.any_has(digests, since), deadline_s)

    def _is_still_deleted(self, doc: AdapterDoc) -> bool:
        """Whether the deletion that made `doc` still stands."""
        document = self._catalog.adapter(doc.tenant, doc.name)
        return document is None or document.doc.deleted_at == doc.deleted_at

    def _gone(self, doc: AdapterDoc) -> set[str]:
        """Its contents that no adapter has any more."""
        return {version.digest for version in versions_of(doc) if not self._residency.is_wanted(version.digest)}


async def _ends(is_in_use: Callable[[], Awaitable[bool]], deadline_s: float) -> bool:
    """Whether `is_in_use`, which checks other servers, turns false by `deadline_s` (monotonic time)."""
    while await is_in_use():
        if time.monotonic() >= deadline_s:
            return False
        await asyncio.sleep(POLL_OTHERS_EVERY_S)
    return True


def adapter_deleted(name: str) -> ServingError:
    """For requests that outlast the time to drain."""
    return ServingError(ErrorCode.MODEL_NOT_FOUND, f"The adapter '{name}' was deleted while the request ran.")
