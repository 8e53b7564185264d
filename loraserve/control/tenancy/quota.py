"""Limits on what a tenant keeps: adapters, versions and their bytes, including deleted ones while they are on disk."""

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from loraserve.control.documents.adapter_edits import check_num_versions, emptied, keep_newest, kept_until
from loraserve.control.documents.catalog import Catalog
from loraserve.control.documents.tenant_edits import tenant_not_found
from loraserve.control.turns import Turns
from loraserve.control.unavailable import RETRY_AFTER_S, redis_required
from loraserve.live.errors import LiveUnavailableError
from loraserve.live.live_store import LiveStore
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.records import AdapterDoc, DocumentKind, Limits
from loraserve.store.upload_session import UploadSession

WAIT_S = 30.0
"""Wait for other servers; twice as long as a killed server keeps its lease."""
POLL_S = 0.05

logger = logging.getLogger(__name__)


class _Kept(NamedTuple):
    digest: str
    size_bytes: int
    until: float
    """Unix time when it is gone from the disk."""


class Quota:
    """Called on the event loop."""

    def __init__(
        self,
        catalog: Catalog,
        live: LiveStore,
        *,
        keep_versions: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """keep_versions: per adapter, when a version is added, see `keep_newest`; None = all."""
        self._catalog = catalog
        self._live = live
        self._keep_versions = keep_versions
        self._clock = clock
        self._turns = Turns()

    @contextlib.asynccontextmanager
    async def turn(self, tenant: str) -> AsyncGenerator[None]:
        """One holder at a time per tenant, across all servers. Knows the tenant's newest limits and, if it has any,
        earlier holders' commits.

        Enter it before `check` and leave it when what was checked is committed: then no two commits use the same room.
        Raises `ServingError`: 503 if Redis is gone or other servers keep the turn too long.
        """
        async with self._turns.take(tenant):
            token = secrets.token_hex(16)
            with redis_required():
                await self._take_lease(tenant, token)
            try:
                await self._catalog.reread(DocumentKind.TENANT, tenant)
                if self._is_limited(tenant):
                    await self._catalog.catch_up_on_adapters()
                yield
            finally:
                await self._release_lease(tenant, token)

    def num_adapters(self, tenant: str) -> int:
        """Without deleted ones; for a deleted tenant, those it had."""
        return sum(document.doc.deleted_at is None for document in self._catalog.held_adapters(tenant))

    def adapter_bytes(self, tenant: str) -> int:
        """Over all versions whose content is on disk; content shared with others counts in full.

        Also for a deleted tenant, as long as it can be restored.
        """
        docs = (document.doc for document in self._catalog.held_adapters(tenant))
        return sum(kept.size_bytes for kept in _kept(docs, self._clock()))

    def check(
        self,
        tenant: str,
        name: str,
        size_bytes: int,
        *,
        open_bytes: int = 0,
        unpublished: Sequence[UploadSession] = (),
    ) -> None:
        """Whether a version of that size may be added. Raises `ServingError`.

        open_bytes: of the tenant's other uploads that are not committed yet. unpublished: uploads that ended without a
        version; content that a version has too does not count twice.
        """
        now = self._clock()
        self.check_adapters(tenant, name)
        self._check_versions(tenant, name, now)
        limit = self._limits(tenant).max_adapter_bytes
        if limit is None:
            return
        docs = (_to_add_to(document.doc, name, now) for document in self._catalog.adapters(tenant))
        kept = _with_unpublished(_kept(docs, now), unpublished, now)
        used = sum(each.size_bytes for each in kept) + open_bytes
        if used + size_bytes > limit:
            message = (
                f"With {size_bytes} bytes more, the tenant '{tenant}' would have {used + size_bytes} bytes; "
                f"its limit is {limit}. Delete versions, or request a higher limit.{_of_deleted(kept)}"
            )
            raise ServingError(ErrorCode.INSUFFICIENT_QUOTA, message)

    def room_bytes(self, tenant: str, *, open_bytes: int = 0, unpublished: Sequence[UploadSession] = ()) -> int | None:
        """The most bytes an upload may have, whatever its name turns out to be; None = no limit. Raises `ServingError`.

        It may still be refused once its name is known: see `check`.
        """
        limit = self._limits(tenant).max_adapter_bytes
        if limit is None:
            return None
        docs = (document.doc for document in self._catalog.adapters(tenant) if document.doc.deleted_at is None)
        now = self._clock()
        used = sum(kept.size_bytes for kept in _with_unpublished(_kept(docs, now), unpublished, now))
        return max(0, limit - used - open_bytes)

    def check_adapters(self, tenant: str, name: str) -> None:
        """Whether the tenant may have an adapter of that name. Raises `ServingError`."""
        limit = self._limits(tenant).max_adapters
        existing = self._catalog.adapter(tenant, name)
        is_new = existing is None or existing.doc.deleted_at is not None
        if limit is not None and is_new and (num_adapters := self.num_adapters(tenant)) + 1 > limit:
            message = (
                f"The tenant '{tenant}' has {num_adapters} adapters; its limit is {limit}. "
                "Delete one, or request a higher limit."
            )
            raise ServingError(ErrorCode.INSUFFICIENT_QUOTA, message)

    def _check_versions(self, tenant: str, name: str, now: float) -> None:
        existing = self._catalog.adapter(tenant, name)
        if existing is None:
            return
        doc = _to_add_to(existing.doc, name, now)
        if self._keep_versions is not None:
            doc = keep_newest(doc, self._keep_versions, now=now)
        check_num_versions(doc, now=now)

    def _limits(self, tenant: str) -> Limits:
        """Raises `ServingError` (404)."""
        document = self._catalog.tenant(tenant)
        if document is None:
            raise tenant_not_found(tenant)
        return document.doc.limits

    def _is_limited(self, tenant: str) -> bool:
        document = self._catalog.tenant(tenant)
        if document is None:
            return True
        limits = document.doc.limits
        return limits.max_adapters is not None or limits.max_adapter_bytes is not None

    async def _take_lease(self, tenant: str, token: str) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not await self._live.publish_leases.try_take(tenant, token):
            if time.monotonic() >= deadline_s:
                message = (
                    f"Other servers kept publishing adapters of the tenant '{tenant}' for {WAIT_S:g} s, and publishing "
                    "two at once could exceed its quota. Try again."
                )
                raise ServingError(ErrorCode.SERVICE_UNAVAILABLE, message, retry_after_s=RETRY_AFTER_S)
            await asyncio.sleep(POLL_S)

    async def _release_lease(self, tenant: str, token: str) -> None:
        try:
            if not await self._live.publish_leases.release(tenant, token):
                logger.warning("publishing for the tenant %s took longer than its lease", tenant)
        except LiveUnavailableError:
            logger.warning("the lease for publishing of the tenant %s could not be released; it will expire", tenant)


def _to_add_to(doc: AdapterDoc, name: str, now: float) -> AdapterDoc:
    """A deleted adapter of that name starts over and can no longer be restored."""
    return emptied(doc, now) if doc.name == name and doc.deleted_at is not None else doc


def _kept(docs: Iterable[AdapterDoc], now: float) -> Iterator[_Kept]:
    """Each version whose content is on disk."""
    for doc in docs:
        for version in doc.versions:
            until = kept_until(doc, version)
            if now < until:
                yield _Kept(version.digest, version.size_bytes, until)


def _with_unpublished(kept: Iterable[_Kept], unpublished: Sequence[UploadSession], now: float) -> list[_Kept]:
    """Plus each other content that an upload left, once."""
    found = [*kept]
    digests = {each.digest for each in found}
    for upload in sorted(unpublished, key=lambda upload: upload.unpublished_until, reverse=True):
        if upload.kept is not None and now < upload.unpublished_until and upload.kept.digest not in digests:
            digests.add(upload.kept.digest)
            found.append(_Kept(upload.kept.digest, upload.size_bytes, upload.unpublished_until))
    return found


def _of_deleted(kept: Iterable[_Kept]) -> str:
    """Part of a message about bytes that nobody can delete any more."""
    deleted = [each for each in kept if each.until < math.inf]
    if not deleted:
        return ""
    num_bytes = sum(each.size_bytes for each in deleted)
    first = datetime.fromtimestamp(min(each.until for each in deleted), UTC)
    return (
        f" {num_bytes} bytes belong to deleted versions, or to uploads that ended without a version. They count until "
        f"they are removed from the disk, the first of them at {first:%Y-%m-%d %H:%M} UTC."
    )
