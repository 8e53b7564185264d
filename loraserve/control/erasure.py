"""Erases tenants that were deleted more than 24 hours ago: first that is decided, then done, then said.

Every step can be repeated, by any server, so a server that is killed in between leaves the rest to the next sweep.

NOTE: a server never loses its last key by this, and so never opens: it takes a key for all tenants (`*`) to delete a
tenant that has keys, and that key's document stays.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from loraserve.control.catalog import RECONCILE_EVERY_S, Catalog
from loraserve.control.declarations import Declarations
from loraserve.control.tenant_edits import is_overdue, mark_erased, mark_erasing
from loraserve.live.errors import LiveUnavailableError
from loraserve.live.live_store import LiveStore
from loraserve.serving.errors import ServingError
from loraserve.store.documents import DocumentStore
from loraserve.store.errors import DamagedFileError
from loraserve.store.records import Document, DocumentKind, TenantDoc
from loraserve.store.uploads import UploadStore

HEARD_AFTER_S = 2 * RECONCILE_EVERY_S
"""Every server that runs knows by then that a tenant is to be erased, and puts nothing of it into Redis any more."""
ACTOR = "server"

logger = logging.getLogger(__name__)


class Erasure:
    """`sweep` is called on the event loop, by every server now and then."""

    def __init__(
        self,
        catalog: Catalog,
        declarations: Declarations,
        live: LiveStore,
        uploads: UploadStore,
        data_dir: Path,
        sweep_contents: Callable[[], object],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """sweep_contents: removes what no document leads to. Synchronous."""
        self._catalog = catalog
        self._declarations = declarations
        self._live = live
        self._uploads = uploads
        # NOTE: a document that cannot be read may be of a tenant that is erased, so then nobody is said to be.
        self._documents = DocumentStore(data_dir, on_damage=_raise)
        self._sweep_contents = sweep_contents
        self._clock = clock

    async def sweep(self) -> None:
        """Also removes all other contents that no document leads to. Raises `DamagedFileError`."""
        emptied: list[str] = []
        with _later_without_redis():
            for document in self._catalog.known_tenants():
                if is_overdue(document.doc, self._clock()):
                    await self._edit(document.id, "tenant.erase", lambda doc: mark_erasing(doc, now=self._clock()))
                elif self._is_to_empty(document):
                    await self._empty(document.id)
                    emptied.append(document.id)
        await asyncio.to_thread(self._sweep_contents)
        with _later_without_redis():
            for tenant in emptied:
                await self._edit(tenant, "tenant.erased", lambda doc: mark_erased(doc, now=self._clock()))

    def _is_to_empty(self, document: Document[TenantDoc]) -> bool:
        doc = document.doc
        return doc.is_erasing and doc.erased_at is None and self._clock() >= document.at + HEARD_AFTER_S

    async def _empty(self, tenant: str) -> None:
        """Nothing of it is in Redis or on the disk afterwards, but its own document, usage and contents.

        Raises `LiveUnavailableError`.
        """
        await asyncio.to_thread(self._documents.forget_older, DocumentKind.TENANT, tenant)
        for kind in (DocumentKind.KEY, DocumentKind.ADAPTER):
            doomed = await asyncio.to_thread(self._ids_of, kind, tenant)
            # First, as the disk is what tells the next sweep of what is left.
            await self._live.documents.remove(kind, doomed)
            await asyncio.to_thread(self._remove, kind, doomed)
        await self._live.requests.forget(tenant)
        await asyncio.to_thread(self._remove_uploads, tenant)

    def _ids_of(self, kind: DocumentKind, tenant: str) -> list[str]:
        found: list[str] = []
        for document in self._documents.scan(kind):
            if not isinstance(document.doc, TenantDoc) and document.doc.tenant == tenant:
                found.append(document.id)
        return found

    def _remove(self, kind: DocumentKind, document_ids: list[str]) -> None:
        for document_id in document_ids:
            self._documents.remove(kind, document_id)

    def _remove_uploads(self, tenant: str) -> None:
        for session in self._uploads.sessions(tenant):
            self._uploads.remove(session.id)

    async def _edit(self, tenant: str, action: str, change: Callable[[TenantDoc], TenantDoc]) -> None:
        def checked(current: Document[TenantDoc] | None) -> TenantDoc:
            assert current is not None, "a tenant's document is never removed"
            return change(current.doc)

        await self._declarations.edit(TenantDoc, tenant, checked, actor=ACTOR, action=action, request_id="")


@contextlib.contextmanager
def _later_without_redis() -> Iterator[None]:
    """What is not done now is left to the next sweep."""
    try:
        yield
    except (ServingError, LiveUnavailableError) as error:
        logger.warning("deleted tenants are erased later: %s", error)


def _raise(damage: DamagedFileError) -> None:
    raise damage
