"""Adapters: listed, changed, deleted with drain, restored, pinned."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from loraserve.control.adapters.pins import Pins
from loraserve.control.adapters.queries import ALL_ADAPTERS, NOTHING_USED, AdapterQuery, AdapterState, order_of
from loraserve.control.contents.residency import Residency
from loraserve.control.documents.adapter_edits import live_version, mark_deleted, mark_restored
from loraserve.control.names.adapter_access import AdapterAccess
from loraserve.control.names.served_base import check_fits, fits
from loraserve.control.paging import Page, page_of
from loraserve.control.requests.draining import Draining
from loraserve.control.tenancy.principal import Principal
from loraserve.control.tenancy.quota import Quota
from loraserve.control.usage.request_totals import AdapterKey
from loraserve.control.usage.traffic import AdapterTraffic
from loraserve.serving.errors import ErrorCode, ServingError, invalid_value
from loraserve.store.records import AdapterDoc, BaseRecord, Document, Pin, Tier, VersionRecord

MAX_DESCRIPTION_CHARACTERS = 2000
MAX_TAGS = 32
MAX_TAG_CHARACTERS = 64
MAX_DRAIN_S = 600.0
MAX_PIN_S = 30 * 86_400.0


@dataclass(frozen=True, slots=True)
class AdapterPatch:
    """Unset fields stay as they are."""

    description: str | UnsetType = UNSET
    tags: list[str] | UnsetType = UNSET
    enabled: bool | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class Deletion:
    document: Document[AdapterDoc]
    drained: bool
    """False: some engine has not released it yet."""


class AdapterService:
    """Reads: the acting tenant's adapters and the shared ones; a tenant's own hides a shared one of the same name.

    Writes: only the acting tenant's own; a shared one gives 403, another tenant's the same 404 as a missing one.

    Every method raises `ServingError`; `expected_rev`: 412 if it is not the newest revision.
    Called on the event loop.
    """

    def __init__(
        self,
        access: AdapterAccess,
        quota: Quota,
        residency: Residency,
        draining: Draining,
        pins: Pins,
        base: BaseRecord,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._access = access
        self._quota = quota
        self._residency = residency
        self._draining = draining
        self._pins = pins
        self._base = base
        self._clock = clock

    def list(
        self,
        principal: Principal,
        query: AdapterQuery = ALL_ADAPTERS,
        traffic: Mapping[AdapterKey, AdapterTraffic] = NOTHING_USED,
    ) -> Page[Document[AdapterDoc]]:
        """traffic: for sorting by requests or last use."""
        found = [found for found in self._access.readable(principal) if query.matches(found, self.state_of)]
        return page_of(found, order_of(query.sort, traffic), limit=query.limit, cursor=query.cursor)

    async def read(self, principal: Principal, name: str, *, with_deleted: bool = False) -> Document[AdapterDoc]:
        """Includes whatever any server committed before this call."""
        return await self._access.read(principal, name, with_deleted=with_deleted)

    def state_of(self, document: Document[AdapterDoc]) -> AdapterState:
        doc = document.doc
        if doc.deleted_at is not None:
            return AdapterState.DRAINING if self._draining.is_in_use(doc) else AdapterState.DELETED
        if not doc.enabled:
            return AdapterState.DISABLED
        live = live_version(doc)
        if live is None:
            return AdapterState.EMPTY
        return AdapterState.READY if self.fits(live) else AdapterState.OTHER_BASE

    def fits(self, version: VersionRecord) -> bool:
        """Whether it was made for the served base, as far as known."""
        return fits(version, self._base)

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
        """Invisible at once. Its requests may run for another `drain_s` and are then aborted, on every server.

        Returns when they have ended and the engines have released it, or soon after they should have: see `Draining`.
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
        return Deletion(document, await self._draining.finish(document.doc, drain_s))

    async def restore(
        self, principal: Principal, request_id: str, name: str, *, expected_rev: int | None = None
    ) -> Document[AdapterDoc]:
        """Within 24 h; changes nothing if it is not deleted. 409 if it was made for another base model."""

        def change(doc: AdapterDoc) -> AdapterDoc:
            if doc.deleted_at is not None:
                self._check_fits(doc)
                # Its bytes kept counting while it was deleted.
                self._quota.check_adapters(doc.tenant, doc.name)
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
        self,
        principal: Principal,
        request_id: str,
        name: str,
        tier: Tier,
        ttl_s: float | None,
        *,
        expected_rev: int | None = None,
    ) -> Document[AdapterDoc]:
        """Load what the bare name means now and keep it in memory on every engine for `ttl_s`; None = until `unpin`.

        409 if this engine's adapter memory has no room for it on the device.
        """
        if tier is Tier.DISK:
            raise invalid_value("tier", f"is 'disk'; it must be '{Tier.HOST}' or '{Tier.DEVICE}'.")
        if ttl_s is not None and not 0 < ttl_s <= MAX_PIN_S:
            raise invalid_value("ttl_s", f"is {ttl_s:g}; it must be more than 0 and at most {MAX_PIN_S:g}.")

        def change(doc: AdapterDoc) -> AdapterDoc:
            self._version_to_load(doc)
            pinned = replace(doc, pin=Pin(tier=tier, until=None if ttl_s is None else self._clock() + ttl_s))
            self._pins.check_room(pinned)
            return pinned

        found = await self._access.read(principal, name)
        if found.doc.tenant == principal.acting_tenant:
            # Before the edit: its size is known only once it is loaded.
            await self._residency.load(self._version_to_load(found.doc).digest)
        return await self._access.edit(principal, request_id, name, "residency.pin", change, expected_rev=expected_rev)

    async def unpin(
        self, principal: Principal, request_id: str, name: str, *, expected_rev: int | None = None
    ) -> Document[AdapterDoc]:
        """Unloads nothing, but permits unloading."""
        return await self._access.edit(
            principal,
            request_id,
            name,
            "residency.unpin",
            lambda doc: replace(doc, pin=None),
            expected_rev=expected_rev,
        )

    def _version_to_load(self, doc: AdapterDoc) -> VersionRecord:
        live = live_version(doc)
        if live is None:
            message = f"The adapter '{doc.name}' has no version to load. Upload one first."
            raise ServingError(ErrorCode.CONFLICT, message)
        check_fits(doc, live, self._base)
        return live

    def _check_fits(self, doc: AdapterDoc) -> None:
        live = live_version(doc)
        if live is not None:
            check_fits(doc, live, self._base)


def _check(doc: AdapterDoc) -> None:
    if len(doc.description) > MAX_DESCRIPTION_CHARACTERS:
        count = len(doc.description)
        raise invalid_value("description", f"has {count} characters; at most {MAX_DESCRIPTION_CHARACTERS} are allowed.")
    if len(doc.tags) > MAX_TAGS:
        raise invalid_value("tags", f"has {len(doc.tags)} tags; at most {MAX_TAGS} are allowed.")
    for tag in doc.tags:
        if not 0 < len(tag) <= MAX_TAG_CHARACTERS or not tag.isprintable():
            raise invalid_value("tags", f"has {tag[:80]!r}; a tag is 1 to {MAX_TAG_CHARACTERS} printable characters.")
