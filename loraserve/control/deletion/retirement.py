"""Removes documents of keys and adapters that have been gone for long, so that unused keys and names do not accumulate.

First from the disk, while nobody commits and only if the document is still the one that was judged; then from Redis,
unless it has a newer revision by then. Other servers forget at their next reconciliation what the disk no longer has.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from loraserve.control.documents.adapter_edits import RESTORABLE_S
from loraserve.control.documents.catalog import Catalog
from loraserve.control.tenancy.authenticator import Authenticator
from loraserve.control.tenancy.key_documents import gone_since
from loraserve.live.errors import LiveUnavailableError
from loraserve.live.live_store import LiveStore
from loraserve.store.documents import KEEP_S, DocumentStore
from loraserve.store.records import AdapterDoc, AnyDocument, Document, DocumentKind, KeyDoc

MAX_GONE = 1000
"""Per tenant, for keys and for adapters: if more of them are gone, documents of the oldest are removed early."""
KEPT_AT_LEAST_S = 3600.0
"""Even above `MAX_GONE`. By then all servers have heard of the change."""
RETIRED_AT_ONCE = 50
"""Nobody can commit until these are set aside; a server that shuts down waits for at most this many."""

D = TypeVar("D", KeyDoc, AdapterDoc)

logger = logging.getLogger(__name__)


class Retirement:
    """Every server calls `sweep` periodically, on the event loop."""

    def __init__(
        self,
        catalog: Catalog,
        documents: DocumentStore,
        live: LiveStore,
        authenticator: Authenticator,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._catalog = catalog
        self._documents = documents
        self._live = live
        self._authenticator = authenticator
        self._clock = clock

    async def sweep(self) -> None:
        """Retire documents of all tenants that are not deleted.

        NOTE: never removes a server's last key, which would open the server, nor a key that is also one of its
        `--api-key`s, which would work again without its document.
        """
        try:
            now = await self._now()
            keys = self._catalog.all_keys()
            doomed = outlived(((key, gone_since(key, now)) for key in keys), now, KEPT_AT_LEAST_S)
            doomed = [key for key in doomed if not self._authenticator.is_flag(key.id)]
            if len(doomed) < len(keys):
                await self._retire(doomed)
            adapters = ((adapter, _deleted_since(adapter)) for adapter in self._catalog.all_adapters())
            doomed_adapters = outlived(adapters, now, RESTORABLE_S + KEPT_AT_LEAST_S)
            await self._retire(doomed_adapters)
        except LiveUnavailableError as error:
            logger.warning("retiring old documents is postponed: %s", error)

    async def _now(self) -> float:
        """This server's time or Redis's, whichever is earlier, as in `Erasure`; at most 30 days after the last change.

        A working key expires after that change, so it is not removed even by a clock that is years ahead, if server and
        Redis share one machine.
        """
        changed_at = (document.at for kind in DocumentKind for document in self._catalog.all(kind))
        live_now = await self._live.connection.server_time_ms() / 1000
        return min(self._clock(), live_now, max(changed_at, default=0.0) + KEEP_S)

    async def _retire(self, documents: Sequence[AnyDocument]) -> None:
        for at in range(0, len(documents), RETIRED_AT_ONCE):
            some = documents[at : at + RETIRED_AT_ONCE]
            kind = some[0].kind
            # NOTE: nothing on an older copy of a data directory, where a document may be gone that came back since.
            known_rev = await self._live.documents.removed_rev(kind)
            revs = await self._live.documents.revs([(kind, each.id) for each in some])
            doomed = [each for each, rev in zip(some, revs, strict=True) if rev <= each.rev]
            retired = await asyncio.to_thread(self._documents.retire, doomed, known_rev)
            for document in retired:
                self._catalog.forget(document)
            if retired:
                removed_rev = await asyncio.to_thread(self._documents.removed_rev, kind)
                await self._live.documents.retire(
                    kind, removed_rev, {document.id: document.rev for document in retired}
                )


def outlived(found: Iterable[tuple[Document[D], float | None]], now: float, at_least_s: float) -> list[Document[D]]:
    """Documents to be removed: those gone for `KEEP_S`, or for `at_least_s` if `MAX_GONE` of the tenant went later.

    found: with the time since which each is gone; None = it is not.
    """
    gone_of: dict[str, list[tuple[float, Document[D]]]] = defaultdict(list)
    for document, since in found:
        if since is not None:
            gone_of[document.doc.tenant].append((since, document))
    doomed: list[Document[D]] = []
    for gone in gone_of.values():
        gone.sort(key=lambda each: each[0], reverse=True)
        for number, (since, document) in enumerate(gone):
            if now >= since + (KEEP_S if number < MAX_GONE else at_least_s):
                doomed.append(document)
    return doomed


def _deleted_since(adapter: Document[AdapterDoc]) -> float | None:
    return None if adapter.doc.deleted_at is None else max(adapter.doc.deleted_at, adapter.at)
