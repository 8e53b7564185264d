"""The only way to change a document: disk, then Redis, then this process's memory, then the answer.

Before that, Redis is asked whether it accepts writes: a change that others would not hear of is refused. If Redis fails
after the change is on disk, the change counts and is put into Redis later.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from loraserve.control.documents.catalog import Catalog
from loraserve.control.unavailable import not_newest, redis_required
from loraserve.live.errors import LiveUnavailableError
from loraserve.live.live_store import LiveStore
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.documents import DocumentStore
from loraserve.store.errors import RevisionTakenError
from loraserve.store.records import AdapterDoc, D, Document, DocumentKind, DocumentRef, KeyDoc, TenantDoc, is_a

MAX_TRIES = 8
"""Per edit, against others that commit the same document at the same time."""

KIND_OF: dict[type, DocumentKind] = {
    TenantDoc: DocumentKind.TENANT,
    KeyDoc: DocumentKind.KEY,
    AdapterDoc: DocumentKind.ADAPTER,
}

logger = logging.getLogger(__name__)


class Declarations:
    """Called on the event loop."""

    def __init__(
        self, documents: DocumentStore, live: LiveStore, catalog: Catalog, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._documents = documents
        self._live = live
        self._catalog = catalog
        self._clock = clock
        self._tasks: set[asyncio.Task[object]] = set()

    async def edit(
        self,
        kind: type[D],
        document_id: str,
        change: Callable[[Document[D] | None], D],
        *,
        actor: str,
        action: str,
        request_id: str,
        expected_rev: int | None = None,
        turn: contextlib.AbstractAsyncContextManager[None] | None = None,
    ) -> Document[D]:
        """Commit what `change` makes of the newest revision (None = there is none); unchanged content commits nothing.

        `change` may be called again with a newer revision, and may raise `ServingError`. expected_rev: `If-Match`, 412
        if it is not the newest. turn: held from before `change` until after the commit. Raises `ServingError`: 409 if
        others keep winning, 503 if Redis accepts no writes or has a newer revision than the disk; nothing is committed
        then. Cancelling the caller does not stop a commit half-way.
        """
        held = turn or contextlib.nullcontext()
        work = self._edit(kind, document_id, change, actor, action, request_id, expected_rev, held)
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Wait for commits whose callers are gone."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _edit(
        self,
        kind: type[D],
        document_id: str,
        change: Callable[[Document[D] | None], D],
        actor: str,
        action: str,
        request_id: str,
        expected_rev: int | None,
        turn: contextlib.AbstractAsyncContextManager[None],
    ) -> Document[D]:
        # Before the disk, because what is there counts: a revocation in an outage must fail, not take effect unseen.
        await self._check_live()
        ref = (KIND_OF[kind], document_id)
        async with turn:
            for _ in range(MAX_TRIES):
                found = await asyncio.to_thread(self._documents.get, KIND_OF[kind], document_id)
                current = found if is_a(found, kind) else None
                _check_precondition(current, expected_rev)
                doc = change(current)
                if current is not None:
                    await self._require_newest(ref)
                if current is not None and doc == current.doc:
                    await self._put_in_redis(current)
                    return current
                rev = await asyncio.to_thread(self._next_rev, KIND_OF[kind], current)
                document = Document(
                    kind=KIND_OF[kind],
                    id=document_id,
                    rev=rev,
                    at=self._clock(),
                    actor=actor,
                    action=action,
                    request_id=request_id,
                    deleted=not isinstance(doc, KeyDoc) and doc.deleted_at is not None,
                    doc=doc,
                )
                try:
                    await asyncio.to_thread(self._documents.commit, document)
                except RevisionTakenError:
                    continue
                await self._put_in_redis(document)
                return document
        message = f"'{document_id}' kept changing; gave up after {MAX_TRIES} tries. Try again."
        raise ServingError(ErrorCode.CONFLICT, message)

    def _next_rev(self, kind: DocumentKind, current: Document[D] | None) -> int:
        return self._documents.first_rev(kind) if current is None else current.rev + 1

    async def _check_live(self) -> None:
        with redis_required():
            await self._live.documents.check_writable()

    async def _require_newest(self, ref: DocumentRef) -> None:
        """NOTE: a change to an older copy would override what was decided since, such as a revocation. Even if the copy
        already has the requested content, the newest revision may not."""
        with redis_required():
            await self._catalog.query_revs([ref])
        if self._catalog.is_behind(ref):
            raise not_newest(f"'{ref[1]}'")

    async def _put_in_redis(self, document: Document[D]) -> None:
        """NOTE: never fails. What is on disk counts, and some of it cannot be repeated: a secret is shown once."""
        try:
            await self._live.documents.put(document)
        except LiveUnavailableError as error:
            logger.warning(
                "%s %s revision %d is on disk; Redis will be updated later: %s",
                document.kind,
                document.id,
                document.rev,
                error,
            )
            self._catalog.put_later(document)
        finally:
            self._catalog.apply(document)

    def _forget(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # The caller may be gone; asyncio would log an error that is never retrieved.
            task.exception()


def _check_precondition(current: Document[D] | None, expected_rev: int | None) -> None:
    if expected_rev is not None and (current is None or current.rev != expected_rev):
        found = "it does not exist" if current is None else f"it is at revision {current.rev}"
        message = f"If-Match requires revision {expected_rev}, but {found}. Read it again and retry."
        raise ServingError(ErrorCode.PRECONDITION_FAILED, message)
