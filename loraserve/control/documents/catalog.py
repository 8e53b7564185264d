"""The newest revision of every document, in memory, kept in sync with the disk and with Redis."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Sequence

from loraserve.control.documents.disk_lag import DiskLag
from loraserve.control.documents.index import DocumentIndex
from loraserve.control.documents.outage import Outage
from loraserve.live.errors import LiveRestartedError, LiveUnavailableError
from loraserve.live.live_store import LiveStore
from loraserve.store.documents import UNSETTLED_NS, DocumentStore, ScanMark, revision_of
from loraserve.store.errors import DamagedFileError
from loraserve.store.records import AnyDocument, Document, DocumentKind, DocumentRef, KeyDoc, is_a

RECONCILE_EVERY_S = 60.0
FOLLOW_WAIT_S = 1.0
RETRY_S = 0.5
PUTS_AT_ONCE = 8
"""Of 16 sockets, so that a reconciliation leaves some for requests."""

logger = logging.getLogger(__name__)


class Catalog(DocumentIndex):
    """Called on the event loop: `catch_up`, then `run` as a task; `synchronise` if Redis turns out to be another."""

    def __init__(self, documents: DocumentStore, live: LiveStore, outage: Outage) -> None:
        super().__init__()
        self._documents = documents
        self._live = live
        self._outage = outage
        self._marks: dict[DocumentKind, ScanMark] = {}
        self._commits_seen_ns = 0
        self._pending_puts: dict[tuple[DocumentKind, str], AnyDocument] = {}
        """Documents that Redis may lack, though otherwise in sync: put every second until it accepts them."""
        self._position: str | None = None
        self._synchronising: asyncio.Task[None] | None = None
        self._lag = DiskLag(self._known_rev)
        self._knows_of_keys = False
        """Whether a key document, readable or not, exists on disk or in Redis, or existed since the start."""

    @property
    def has_keys(self) -> bool:
        """Counts revoked keys, and keys whose documents cannot be read."""
        return self._knows_of_keys or super().has_keys

    @property
    def ready(self) -> bool:
        """Whether disk, Redis and memory were brought in sync since Redis last came (back)."""
        return self._position is not None and self._live.view.accepted is not None

    async def catch_up(self) -> None:
        """Afterwards everything that any server committed before this call is known: enough to read, not to admit."""
        await self._scan()

    async def catch_up_on_adapters(self) -> None:
        """As `catch_up`, but only of adapters, and those that were retired may still be known.

        With 10,000 adapters it takes 0.5 instead of 30 ms, and 8 after 60 commits within two seconds.
        """
        await self._learn_changed(DocumentKind.ADAPTER, is_quick=True)

    async def refresh(self, kind: DocumentKind, document_id: str) -> AnyDocument | None:
        """Read one document from disk and make sure that Redis has it. Raises `LiveUnavailableError`."""
        document = await self._reload(kind, document_id)
        if document is not None:
            await self._put(document)
        return self.get(kind, document_id)

    async def reread(self, kind: DocumentKind, document_id: str) -> None:
        """Afterwards every revision of this document that any server committed before this call is known."""
        await self._reload(kind, document_id)

    async def query_revs(self, refs: Sequence[DocumentRef]) -> None:
        """Afterwards Redis's newest revision of each of these is known, or `is_behind` reports that the disk lacks it.

        Raises `LiveUnavailableError`.
        """
        revs = await self._live.documents.revs(refs) if refs else []
        for ref, rev in zip(refs, revs, strict=True):
            await self._note_rev(ref, rev)

    async def try_query_revs(self, refs: Sequence[DocumentRef]) -> None:
        """As `query_revs`; while Redis is gone, `is_behind` relies on what it reported last."""
        try:
            await self.query_revs(refs)
        except LiveUnavailableError:
            for ref in filter(self.is_behind, refs):
                await self.reread(*ref)

    def is_behind(self, ref: DocumentRef) -> bool:
        """Whether Redis reported a newer revision than the disk has: see `DiskLag`."""
        return self._lag.has(ref)

    async def try_refresh(self, kind: DocumentKind, document_id: str) -> AnyDocument | None:
        """As `refresh`, but while Redis is gone, the disk is enough."""
        with contextlib.suppress(LiveUnavailableError):
            return await self.refresh(kind, document_id)
        return self.get(kind, document_id)

    def put_later(self, document: AnyDocument) -> None:
        """Put a document that is known here into Redis within a second, or as soon as Redis accepts it.

        Until then other servers find it on disk: a key or tenant within two seconds, an adapter within a minute.
        """
        self._pending_puts[document.kind, document.id] = document

    def apply(self, document: AnyDocument) -> bool:
        is_newer = super().apply(document)
        if is_newer:
            self._lag.note_read((document.kind, document.id))
        return is_newer

    def forget(self, document: AnyDocument) -> bool:
        """NOTE: also drops it from the documents still to be put into Redis."""
        if self._pending_puts.get((document.kind, document.id)) is document:
            del self._pending_puts[document.kind, document.id]
        return super().forget(document)

    async def synchronise(self) -> None:
        """Sync with a Redis that was emptied or restarted, or is older: all documents by revision, then it is trusted.

        Returns at once if that is not needed; all callers wait for the same work. Raises `LiveUnavailableError`.
        """
        if self.ready:
            return
        if self._synchronising is None or self._synchronising.done():
            self._synchronising = asyncio.create_task(self._synchronise())
            self._synchronising.add_done_callback(_note_seen)
        await asyncio.shield(self._synchronising)

    async def _synchronise(self) -> None:
        while not self.ready:
            mark = await self._live.view.begin()
            position = await self._live.changes.latest()
            await self._scan()
            self._pending_puts.clear()
            for kind in DocumentKind:
                await self._reconcile(kind)
            if await self._live.view.accept(mark):
                self._position = position

    async def run(self) -> None:
        """Follow all changes until cancelled. Raises `LiveSchemaError`."""
        while True:
            try:
                await self.synchronise()
                await self._follow()
            except LiveRestartedError:
                continue
            except LiveUnavailableError as error:
                self._outage.failed(error)
                # Changes on disk during the outage, such as a key revoked offline, count all the same.
                await self._scan()
                await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        """Afterwards nothing runs in the background."""
        if self._synchronising is not None:
            self._synchronising.cancel()
            await asyncio.gather(self._synchronising, return_exceptions=True)

    async def _follow(self) -> None:
        next_reconcile_s = time.monotonic() + RECONCILE_EVERY_S
        while self.ready:
            assert self._position is not None
            for change in await self._live.changes.read(self._position, FOLLOW_WAIT_S):
                ref = (change.kind, change.id)
                # NOTE: skip known changes. Redis may be further by now, so they must not count as its newest revision.
                if self._known_rev(ref) < change.rev:
                    await self._note_rev(ref, change.rev)
                if change.kind is DocumentKind.KEY and not self.has_keys:
                    self._note_keys()
                self._position = change.position
            if not await self._live.view.is_current():
                return
            self._outage.is_full = await self._live.documents.is_full()
            self._outage.succeeded()
            await self._notice_commits()
            if time.monotonic() >= next_reconcile_s:
                next_reconcile_s = time.monotonic() + RECONCILE_EVERY_S
                await self._scan()
            # A full Redis would reject these and then count as gone, which it is not.
            if not self._outage.is_full:
                await self._put_pending()

    async def _notice_commits(self) -> None:
        """Learn of keys created or revoked only in the data directory, by `loraserve keys … --data-dir`, and of tenants
        deleted by a server that died before it notified others."""
        commits_ns = await asyncio.to_thread(self._documents.last_commit_ns)
        if commits_ns == self._commits_seen_ns:
            return
        is_settled = commits_ns < time.time_ns() - UNSETTLED_NS
        # NOTE: seen only once all was read; otherwise a file that was briefly unreadable waits for a reconciliation.
        if await self._scan([DocumentKind.TENANT, DocumentKind.KEY]) and is_settled:
            self._commits_seen_ns = commits_ns

    async def _scan(self, kinds: Iterable[DocumentKind] = DocumentKind) -> bool:
        """Learn the documents whose folders changed since the last scan; they are put into Redis later.

        False: the system did not let some be read; the next scan tries them again.
        """
        is_complete = True
        # Before the scan: if there are key files now and no key is known after it, none of them can be read.
        has_key_files = not self.has_keys and await asyncio.to_thread(self._documents.has_any, DocumentKind.KEY)
        for kind in kinds:
            await self._learn_changed(kind)
            is_complete = is_complete and self._marks[kind].is_complete
            await self._forget_retired(kind)
            if kind is DocumentKind.KEY and self._marks[kind].damaged_revs:
                for key in self.all(kind):
                    if is_a(key, KeyDoc) and self._marks[kind].has_newer(key):
                        self._withdraw(key)
        if has_key_files:
            self._note_keys()
        return is_complete

    async def _learn_changed(self, kind: DocumentKind, *, is_quick: bool = False) -> None:
        changed, self._marks[kind] = await asyncio.to_thread(
            self._documents.scan_changed, kind, self._marks.get(kind), is_quick=is_quick
        )
        for document in changed:
            self.apply(document)
            self.put_later(document)

    async def _reconcile(self, kind: DocumentKind) -> None:
        """Afterwards Redis has at least our revisions, and we have those on disk that Redis knows."""
        await self._reconcile_retired(kind)
        revs = await self._live.documents.all_revs(kind)
        for document_id, rev in revs.items():
            known = self.get(kind, document_id)
            if known is None or known.rev < rev:
                document = await self._read(kind, document_id)
                if document is not None:
                    self.apply(document)
                elif await self._forget_erased(kind, document_id) or await self._remove_retired(kind, document_id, rev):
                    revs[document_id] = 0
        refs = {(kind, document_id) for document_id in revs}
        refs.update((kind, document.id) for document in self.all(kind))
        refs.update(self._lag.of_kind(kind))
        for ref in refs:
            self._lag.compare(ref, revs.get(ref[1], 0))
        if kind is DocumentKind.KEY and revs:
            self._note_keys()
        await self._put_all(document for document in self.all(kind) if revs.get(document.id, 0) < document.rev)

    async def forget_erased(self) -> None:
        """Afterwards Redis has no document of an erased tenant, whoever put it there. Raises `LiveUnavailableError`."""
        for kind in (DocumentKind.KEY, DocumentKind.ADAPTER):
            for document_id in await self._live.documents.ids(kind):
                if self.get(kind, document_id) is None:
                    await self._forget_erased(kind, document_id)

    async def _forget_erased(self, kind: DocumentKind, document_id: str) -> bool:
        """Whether a document that the disk lacks is an erased tenant's, which an older Redis may still have. If so, it
        is removed from Redis. Tenants must be in sync."""
        document = await self._live.documents.get(kind, document_id)
        if document is None or not self.is_erased(document):
            return False
        await self._live.documents.remove(kind, [document_id])
        return True

    async def _reconcile_retired(self, kind: DocumentKind) -> None:
        """Afterwards Redis and we know up to which revisions documents were retired."""
        # NOTE: read Redis first. A retirement in between is recorded on disk before it is in Redis.
        known_rev = await self._live.documents.removed_rev(kind)
        try:
            removed_rev = await asyncio.to_thread(self._documents.removed_rev, kind)
        except DamagedFileError as damage:
            logger.error("%s", damage)
            removed_rev = 0
        await self._live.documents.retire(kind, removed_rev, {})
        self._lag.compare_retired(kind, known_rev, removed_rev)

    async def _forget_retired(self, kind: DocumentKind) -> None:
        """Afterwards no document is known here that any server retired before this call."""
        known = self.all(kind)
        # A generator, so that the thread goes through all documents and not the event loop.
        revs = ((document.id, document.rev) for document in known)
        if retired := {*await self._retired_among(kind, revs, self._marks[kind])}:
            for document in known:
                if document.id in retired:
                    self.forget(document)

    async def _retired_among(
        self, kind: DocumentKind, revs: Iterable[tuple[str, int]], mark: ScanMark | None
    ) -> list[str]:
        """Empty if that cannot be determined."""
        try:
            return await asyncio.to_thread(self._documents.retired_among, kind, revs, mark)
        except DamagedFileError as damage:
            logger.error("%s", damage)
            return []

    async def _remove_retired(self, kind: DocumentKind, document_id: str, rev: int) -> bool:
        """Whether a document that the disk lacks was retired; an older Redis, or a server that was killed in between,
        may have left it in Redis. If so, it is removed from Redis."""
        if self._lag.is_missing_removals(kind) or not await self._retired_among(kind, [(document_id, rev)], None):
            return False
        await self._live.documents.retire(kind, rev, {document_id: rev})
        return True

    async def _put_all(self, documents: Iterable[AnyDocument]) -> None:
        pending = iter([*documents])

        async def put_next() -> None:
            for document in pending:
                await self._put(document)

        workers = [asyncio.create_task(put_next()) for _ in range(PUTS_AT_ONCE)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()

    async def _put_pending(self) -> None:
        if not self._pending_puts:
            return
        pending = self._pending_puts.copy()
        await self._put_all(pending.values())
        for key, document in pending.items():
            if self._pending_puts.get(key) is document:
                del self._pending_puts[key]

    async def _put(self, document: AnyDocument) -> None:
        if self.is_erased(document) or self._lag.may_be_retired(document.kind, document.rev):
            return
        rev = await self._live.documents.put(document)
        if rev > document.rev:
            await self._note_rev((document.kind, document.id), rev)

    async def _note_rev(self, ref: DocumentRef, rev: int) -> None:
        """Take in that Redis has this revision, 0 = none."""
        if self._known_rev(ref) < rev:
            await self.reread(*ref)
        self._lag.compare(ref, rev)

    def _known_rev(self, ref: DocumentRef) -> int:
        known = self.get(*ref)
        return 0 if known is None else known.rev

    async def _reload(self, kind: DocumentKind, document_id: str) -> AnyDocument | None:
        """Take in the document as it is on disk; forget it if it was retired."""
        document = await self._read(kind, document_id)
        known = self.get(kind, document_id)
        if document is not None:
            self.apply(document)
        elif known is not None and await self._retired_among(kind, [(document_id, known.rev)], None):
            self.forget(known)
        return document

    async def _read(self, kind: DocumentKind, document_id: str) -> AnyDocument | None:
        """None if there is none, or it is damaged."""
        try:
            return await asyncio.to_thread(self._documents.get, kind, document_id)
        except DamagedFileError as damage:
            logger.error("%s", damage)
            known = self.get(kind, document_id)
            if is_a(known, KeyDoc) and revision_of(damage) > known.rev:
                self._withdraw(known)
            return None

    def _withdraw(self, key: Document[KeyDoc]) -> None:
        """Hide the key, as after a restart: its newest revision cannot be read and may be its revocation."""
        logger.error("the key %r is refused from now on: a newer revision of it cannot be read", key.id)
        self._pending_puts.pop((key.kind, key.id), None)
        self.withdraw(key)

    def _note_keys(self) -> None:
        """Keys exist. NOTE: if none of their documents can be read, nobody is let in, rather than everybody."""
        if not self.has_keys:
            logger.error(
                "API keys exist, but none of their documents can be read: the server stays closed and "
                "accepts none of these keys. Restore the files named above, or create a key: "
                "loraserve keys create --role admin --data-dir DIR"
            )
        self._knows_of_keys = True


def _note_seen(task: asyncio.Task[None]) -> None:
    """Retrieve the error, or asyncio logs it as never retrieved if all callers are gone."""
    if not task.cancelled():
        task.exception()
