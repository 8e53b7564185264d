"""Adapters: listed, changed, deleted with drain, restored, kept at hand."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Protocol

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from loraserve.control.adapter_access import AdapterAccess
from loraserve.control.adapter_edits import find_version, mark_deleted, mark_restored, version_of, versions_of
from loraserve.control.paging import DEFAULT_PAGE, Page, page_of
from loraserve.control.principal import Principal
from loraserve.control.quota import Quota
from loraserve.control.request_totals import AdapterKey
from loraserve.control.residency import Residency
from loraserve.control.running import RunningRequests
from loraserve.control.usage_traffic import NO_TRAFFIC, AdapterTraffic
from loraserve.serving.errors import ErrorCode, ServingError, invalid_value
from loraserve.store.records import LIVE_ALIAS, AdapterDoc, Document, Pin, Tier

MAX_DESCRIPTION_CHARACTERS = 2000
MAX_TAGS = 32
MAX_TAG_CHARACTERS = 64
MAX_DRAIN_S = 600.0
MAX_PIN_S = 30 * 86_400.0
ACK_WAIT_S = 5.0
"""How long a deletion waits for engines once no request uses the adapter."""
ASK_OTHERS_EVERY_S = 0.2
NOTHING_USED: Mapping[AdapterKey, AdapterTraffic] = MappingProxyType({})


class AdapterState(StrEnum):
    READY = "ready"
    DISABLED = "disabled"
    EMPTY = "empty"
    """No version yet."""
    DRAINING = "draining"
    """Deleted, with requests that still run or an engine that still has it."""
    DELETED = "deleted"


class AdapterSort(StrEnum):
    """A minus: the largest or newest first. Equals are in order of their names."""

    NAME = "name"
    NAME_DOWN = "-name"
    SIZE = "size"
    """Of the live version."""
    LARGEST = "-size"
    CREATED = "created_at"
    NEWEST = "-created_at"
    UPDATED = "updated_at"
    LAST_UPDATED = "-updated_at"
    REQUESTS = "requests"
    """In the last 24 hours."""
    MOST_REQUESTS = "-requests"
    LAST_USED = "last_used"
    """What was never used counts as the oldest."""
    LATEST_USED = "-last_used"


@dataclass(frozen=True, slots=True)
class AdapterQuery:
    q: str = ""
    """Part of the name or the description, case ignored."""
    tag: str | None = None
    state: AdapterState | None = None
    """None = all but deleted ones."""
    sort: AdapterSort = AdapterSort.NAME
    limit: int = DEFAULT_PAGE
    cursor: str | None = None


@dataclass(frozen=True, slots=True)
class AdapterPatch:
    """Only what is set changes."""

    description: str | UnsetType = UNSET
    tags: list[str] | UnsetType = UNSET
    enabled: bool | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class Deletion:
    document: Document[AdapterDoc]
    drained: bool
    """False: some engine has not let go yet."""


class OtherEngines(Protocol):
    """The engines of other servers on the same Redis."""

    async def last_said(self) -> Mapping[str, float]:
        """When each of them last told what it has."""
        ...

    async def any_has(self, digests: set[str], since: Mapping[str, float]) -> bool:
        """By their newest snapshots; one that has told nothing new since `last_said` may have them all. Engines that
        are gone have nothing."""
        ...


class AdapterService:
    """Reads: the acting tenant's adapters and the shared ones, a tenant's own hiding a shared one of the same name.

    Writes: the acting tenant's own only; a shared one gives 403, a foreign one the same 404 as a missing one.
    Every method raises `ServingError`; `expected_rev`: 412 when it is not the newest revision.
    Called on the event loop.
    """

    def __init__(
        self,
        access: AdapterAccess,
        quota: Quota,
        running: RunningRequests,
        residency: Residency,
        *,
        others: OtherEngines | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._access = access
        self._quota = quota
        self._running = running
        self._residency = residency
        self._others = others
        self._clock = clock

    def list(
        self,
        principal: Principal,
        query: AdapterQuery = AdapterQuery(),
        traffic: Mapping[AdapterKey, AdapterTraffic] = NOTHING_USED,
    ) -> Page[Document[AdapterDoc]]:
        """traffic: what to sort by, if by that."""
        found = [document for document in self._access.readable(principal) if self._matches(document, query)]
        found.sort(key=lambda document: document.doc.name)
        by, is_down = _sort_key(query.sort, traffic)
        found.sort(key=by, reverse=is_down)
        return page_of(found, lambda document: document.id, limit=query.limit, cursor=query.cursor)

    async def read(self, principal: Principal, name: str, *, with_deleted: bool = False) -> Document[AdapterDoc]:
        """With what any server committed before this call."""
        return await self._access.read(principal, name, with_deleted=with_deleted)

    def state_of(self, document: Document[AdapterDoc]) -> AdapterState:
        doc = document.doc
        if doc.deleted_at is not None:
            return AdapterState.DRAINING if self._is_draining(doc) else AdapterState.DELETED
        if not doc.enabled:
            return AdapterState.DISABLED
        return AdapterState.READY if LIVE_ALIAS in doc.aliases else AdapterState.EMPTY

    async def patch(
        self, principal: Principal, request_id: str, name: str, patch: AdapterPatch, *, expected_rev: int | None = None
    ) -> Document[AdapterDoc]:
        def change(doc: AdapterDoc) -> AdapterDoc:
            doc = replace(
                doc,
                description=doc.description if isinstance(patch.description, UnsetType) else patch.description,
                tags=doc.tags if isinstance(patch.tags, UnsetType) else sorted(set(patch.tags)),
                enabled=doc.enabled if isinstance(patch.enabled, UnsetType) else patch.enabled,
            )
            _check(doc)
            return doc

        return await self._access.edit(principal, request_id, name, "adapter.change", change, expected_rev=expected_rev)

    async def delete(
        self,
        principal: Principal,
        request_id: str,
        name: str,
        *,
        drain_s: float = 30.0,
        expected_rev: int | None = None,
    ) -> Deletion:
        """Invisible at once. Its requests may run for another `drain_s` and are aborted then, on every server.

        Returns when they have ended and the engines have let go, or `ACK_WAIT_S` after the last one ended.
        """
        if not 0 <= drain_s <= MAX_DRAIN_S:
            raise invalid_value("drain_s", f"is {drain_s:g}; it must be 0 to {MAX_DRAIN_S:g}.")
        document = await self._access.edit(
            principal,
            request_id,
            name,
            "adapter.delete",
            lambda doc: mark_deleted(doc, now=self._clock(), drain_until=self._clock() + drain_s),
            expected_rev=expected_rev,
        )
        return Deletion(document, await self._drained(document.doc, drain_s))

    async def restore(
        self, principal: Principal, request_id: str, name: str, *, expected_rev: int | None = None
    ) -> Document[AdapterDoc]:
        """Within 24 h; changes nothing where nothing is deleted."""

        def change(doc: AdapterDoc) -> AdapterDoc:
            if doc.deleted_at is not None:
                size_bytes = sum(version.size_bytes for version in versions_of(doc))
                self._quota.check(doc.tenant, doc.name, size_bytes)
            return mark_restored(doc, now=self._clock())

        return await self._access.edit(
            principal,
            request_id,
            name,
            "adapter.restore",
            change,
            expected_rev=expected_rev,
            with_deleted=True,
            turn=self._quota.turn(principal.acting_tenant),
        )

    async def pin(
        self, principal: Principal, request_id: str, name: str, tier: Tier, ttl_s: float
    ) -> Document[AdapterDoc]:
        """Load what the bare name means now, and keep it at hand for `ttl_s` on every engine."""
        if tier is Tier.DISK:
            raise invalid_value("tier", f"is 'disk'; it must be '{Tier.HOST}' or '{Tier.DEVICE}'.")
        if not 0 < ttl_s <= MAX_PIN_S:
            raise invalid_value("ttl_s", f"is {ttl_s:g}; it must be more than 0 and at most {MAX_PIN_S:g}.")

        def change(doc: AdapterDoc) -> AdapterDoc:
            if LIVE_ALIAS not in doc.aliases:
                message = f"The adapter '{name}' has no version to load. Upload one first."
                raise ServingError(ErrorCode.CONFLICT, message)
            return replace(doc, pin=Pin(tier=tier, until=self._clock() + ttl_s))

        document = await self._access.edit(principal, request_id, name, "residency.pin", change)
        await self._residency.load(version_of(document.doc, document.doc.aliases[LIVE_ALIAS].version).digest)
        return document

    async def unpin(self, principal: Principal, request_id: str, name: str) -> Document[AdapterDoc]:
        """Nothing is unloaded by this; it may be."""
        return await self._access.edit(
            principal, request_id, name, "residency.unpin", lambda doc: replace(doc, pin=None)
        )

    def _matches(self, document: Document[AdapterDoc], query: AdapterQuery) -> bool:
        doc = document.doc
        if query.tag is not None and query.tag not in doc.tags:
            return False
        part = query.q.casefold()
        if part and part not in doc.name.casefold() and part not in doc.description.casefold():
            return False
        return doc.deleted_at is None if query.state is None else self.state_of(document) is query.state

    def _is_draining(self, doc: AdapterDoc) -> bool:
        return bool(self._running.of_adapter(doc.tenant, doc.name)) or any(
            not self._residency.has_forgotten(digest) for digest in self._gone(doc)
        )

    def _gone(self, doc: AdapterDoc) -> set[str]:
        """Its contents that no adapter has any more."""
        return {version.digest for version in versions_of(doc) if not self._residency.is_wanted(version.digest)}

    async def _drained(self, doc: AdapterDoc, drain_s: float) -> bool:
        since = {} if self._others is None else await self._others.last_said()
        if not await self._running.wait_ended(doc.tenant, doc.name, drain_s):
            for request in self._running.of_adapter(doc.tenant, doc.name):
                request.abort(adapter_deleted(doc.name))
        gone = self._gone(doc)
        deadline_s = time.monotonic() + ACK_WAIT_S
        if not await self._residency.wait_unloaded(gone, ACK_WAIT_S):
            return False
        while self._others is not None and await self._others.any_has(gone, since):
            if time.monotonic() >= deadline_s:
                return False
            await asyncio.sleep(ASK_OTHERS_EVERY_S)
        return not self._running.of_adapter(doc.tenant, doc.name)


def adapter_deleted(name: str) -> ServingError:
    """For requests that run beyond the time to drain."""
    return ServingError(ErrorCode.MODEL_NOT_FOUND, f"The adapter '{name}' was deleted while the request ran.")


def _sort_key(
    sort: AdapterSort, traffic: Mapping[AdapterKey, AdapterTraffic]
) -> tuple[Callable[[Document[AdapterDoc]], Any], bool]:
    """And whether the largest comes first."""

    def of(document: Document[AdapterDoc]) -> AdapterTraffic:
        return traffic.get((document.doc.tenant, document.doc.name), NO_TRAFFIC)

    keys: dict[str, Callable[[Document[AdapterDoc]], Any]] = {
        AdapterSort.NAME: lambda document: document.doc.name,
        AdapterSort.SIZE: lambda document: _live_size_bytes(document.doc),
        AdapterSort.CREATED: lambda document: document.doc.created_at,
        AdapterSort.UPDATED: lambda document: document.at,
        AdapterSort.REQUESTS: lambda document: of(document).num_requests,
        AdapterSort.LAST_USED: lambda document: of(document).last_used_at or 0.0,
    }
    return keys[sort.removeprefix("-")], sort.startswith("-")


def _live_size_bytes(doc: AdapterDoc) -> int:
    alias = doc.aliases.get(LIVE_ALIAS)
    live = None if alias is None else find_version(doc, alias.version)
    return 0 if live is None else live.size_bytes


def _check(doc: AdapterDoc) -> None:
    if len(doc.description) > MAX_DESCRIPTION_CHARACTERS:
        count = len(doc.description)
        raise invalid_value("description", f"has {count} characters; at most {MAX_DESCRIPTION_CHARACTERS}.")
    if len(doc.tags) > MAX_TAGS:
        raise invalid_value("tags", f"has {len(doc.tags)} tags; at most {MAX_TAGS}.")
    for tag in doc.tags:
        if not 0 < len(tag) <= MAX_TAG_CHARACTERS or not tag.isprintable():
            raise invalid_value("tags", f"has {tag[:80]!r}; a tag is 1 to {MAX_TAG_CHARACTERS} printable characters.")
