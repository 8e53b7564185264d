"""Erases tenants that were deleted more than 24 hours ago: records the decision, removes the data, records completion.

Any server can repeat any step, so if a server is killed in between, the next sweep finishes its work. If a server that
lags or runs an older release writes something of an erased tenant, the next sweep removes that too.

NOTE: erasing never removes a server's last key, which would open the server: deleting a tenant that has keys takes a
key for all tenants (`*`), and that key's document stays as long as no other undeleted tenant has one, see `Retirement`.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from loraserve.control.deletion.remains import Found, Remains
from loraserve.control.documents.catalog import RECONCILE_EVERY_S, Catalog
from loraserve.control.documents.declarations import Declarations
from loraserve.control.documents.tenant_edits import is_overdue, mark_erased, mark_erasing
from loraserve.live.errors import LiveUnavailableError
from loraserve.live.live_store import LiveStore
from loraserve.serving.errors import ServingError
from loraserve.store.errors import DamagedFileError
from loraserve.store.records import Document, TenantDoc

PROPAGATED_AFTER_S = 2 * RECONCILE_EVERY_S
"""By then every running server knows that a tenant is to be erased, and no longer puts anything of it into Redis."""
REMOVED_AT_ONCE = 100
"""Documents; a server that shuts down waits for at most this many."""
ACTOR = "server"

logger = logging.getLogger(__name__)


class Erasure:
    """Every server calls `sweep` periodically, on the event loop."""

    def __init__(
        self,
        catalog: Catalog,
        declarations: Declarations,
        live: LiveStore,
        remains: Remains,
        sweep_contents: Callable[[float], object],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """sweep_contents: removes contents that no document refers to at the given time. Synchronous."""
        self._catalog = catalog
        self._declarations = declarations
        self._live = live
        self._remains = remains
        self._sweep_contents = sweep_contents
        self._clock = clock

    async def sweep(self) -> None:
        """Also removes all other contents that no document refers to. Raises `DamagedFileError`.

        Uses this server's time or Redis's, whichever is earlier: what a fast clock removes cannot be restored.
        """
        now = self._clock()
        emptied: set[str] = set()
        with _later_without_redis():
            now = min(now, await self._live.connection.server_time_ms() / 1000)
            await self._decide(now)
            emptied = await self._empty(now)
        await asyncio.to_thread(self._sweep_contents, now)
        with _later_without_redis():
            for tenant in emptied:
                await self._edit(tenant, "tenant.erased", lambda current: mark_erased(current.doc, now=self._clock()))

    async def _decide(self, now: float) -> None:
        for document in self._catalog.known_tenants():
            if is_overdue(document.doc, now):
                await self._edit(document.id, "tenant.erase", lambda current: mark_erasing(current.doc, now=now))

    async def _empty(self, now: float) -> set[str]:
        """Afterwards Redis and the disk contain nothing of tenants that are being erased, or were, except their own
        documents, usage and contents. Returns those whose completion is yet to be recorded. Raises
        `LiveUnavailableError`.
        """
        erasing = {document.id: document.doc for document in self._catalog.known_tenants() if _is_due(document, now)}
        if not erasing:
            return set()
        found = await asyncio.to_thread(self._remains.find, {*erasing})
        await self._remove(found)
        await self._live.requests.forget(found.tenants)
        unsaid = {tenant for tenant in found.tenants if erasing[tenant].erased_at is None}
        await asyncio.to_thread(self._remains.forget_history, unsaid)
        return unsaid if found.is_all else set()

    async def _remove(self, found: Found) -> None:
        for kind, document_ids in found.documents.items():
            for at in range(0, len(document_ids), REMOVED_AT_ONCE):
                doomed = document_ids[at : at + REMOVED_AT_ONCE]
                # Redis first: the next sweep reads from the disk what is left to do.
                await self._live.documents.remove(kind, doomed)
                await asyncio.to_thread(self._remains.remove, kind, doomed)
        await self._catalog.forget_erased()
        await asyncio.to_thread(self._remains.remove_uploads, found.uploads)

    async def _edit(self, tenant: str, action: str, change: Callable[[Document[TenantDoc]], TenantDoc]) -> None:
        """Does nothing while its document cannot be read, or on an older copy of a data directory, where a tenant that
        was restored since is still deleted. Other tenants are erased regardless."""

        def checked(current: Document[TenantDoc] | None) -> TenantDoc:
            assert current is not None, "a tenant's document is never removed"
            return change(current)

        try:
            await self._declarations.edit(TenantDoc, tenant, checked, actor=ACTOR, action=action, request_id="")
        except (DamagedFileError, ServingError) as error:
            logger.error("erasing the tenant %r is postponed: %s", tenant, error)


def _is_due(document: Document[TenantDoc], now: float) -> bool:
    doc = document.doc
    return doc.is_erasing and (doc.erased_at is not None or now >= document.at + PROPAGATED_AFTER_S)


@contextlib.contextmanager
def _later_without_redis() -> Iterator[None]:
    """If Redis is gone, leave the rest to the next sweep."""
    try:
        yield
    except LiveUnavailableError as error:
        logger.warning("erasing deleted tenants is postponed: %s", error)
