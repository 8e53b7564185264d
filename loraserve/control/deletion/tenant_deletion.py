"""Deletes and restores tenants: one revision of the tenant's document decides about everything it owns."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from loraserve.control.documents.catalog import Catalog
from loraserve.control.documents.declarations import Declarations
from loraserve.control.documents.tenant_edits import (
    TenantState,
    check_deletable,
    mark_deleted,
    mark_restored,
    state_of,
    tenant_not_found,
)
from loraserve.control.requests.draining import Draining
from loraserve.control.requests.revocation import Revocation
from loraserve.control.tenancy.principal import Action, Principal
from loraserve.store.records import AdapterDoc, Document, TenantDoc


@dataclass(frozen=True, slots=True)
class TenantDeletion:
    document: Document[TenantDoc]
    drained: bool
    """False: some server or engine has not released it yet."""

    @property
    def state(self) -> TenantState:
        """Takes all servers into account, unlike `TenantDeletionService.state_of`."""
        return state_of(self.document.doc, is_in_use=not self.drained)


class TenantDeletionService:
    """Called on the event loop. Every method raises `ServingError`, 403 without an admin key for all tenants (`*`);
    `expected_rev`: 412 if it is not the newest revision."""

    def __init__(
        self,
        catalog: Catalog,
        declarations: Declarations,
        revocation: Revocation,
        draining: Draining,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._catalog = catalog
        self._declarations = declarations
        self._revocation = revocation
        self._draining = draining
        self._clock = clock

    def state_of(self, document: Document[TenantDoc]) -> TenantState:
        is_deleted = document.doc.deleted_at is not None
        is_in_use = is_deleted and self._draining.is_tenant_in_use(document.id, self._adapters(document.id))
        return state_of(document.doc, is_in_use=is_in_use)

    async def delete(
        self, principal: Principal, request_id: str, tenant: str, *, expected_rev: int | None = None
    ) -> TenantDeletion:
        """From the next request on, nobody can act for it on any server; running requests are aborted. Idempotent.

        Returns when they have ended and engines have released its adapters, or soon after they should have: see
        `Draining`.
        """
        principal.require(Action.ADMINISTER_ALL)
        check_deletable(tenant)
        document = await self._edit(principal, request_id, tenant, "tenant.delete", self._deleted, expected_rev)
        self._revocation.check()
        return TenantDeletion(document, await self._draining.finish_tenant(tenant, self._adapters(tenant)))

    async def restore(
        self, principal: Principal, request_id: str, tenant: str, *, expected_rev: int | None = None
    ) -> Document[TenantDoc]:
        """Within 24 h, with its keys and adapters as they were; changes nothing if it is not deleted."""
        principal.require(Action.ADMINISTER_ALL)
        return await self._edit(principal, request_id, tenant, "tenant.restore", self._restored, expected_rev)

    async def _edit(
        self,
        principal: Principal,
        request_id: str,
        tenant: str,
        action: str,
        change: Callable[[Document[TenantDoc]], TenantDoc],
        expected_rev: int | None,
    ) -> Document[TenantDoc]:
        def checked(current: Document[TenantDoc] | None) -> TenantDoc:
            if current is None:
                raise tenant_not_found(tenant)
            return change(current)

        return await self._declarations.edit(
            TenantDoc,
            tenant,
            checked,
            actor=principal.actor,
            action=action,
            request_id=request_id,
            expected_rev=expected_rev,
        )

    def _deleted(self, current: Document[TenantDoc]) -> TenantDoc:
        return mark_deleted(current.doc, now=self._clock())

    def _restored(self, current: Document[TenantDoc]) -> TenantDoc:
        return mark_restored(current.id, current.doc, now=self._clock())

    def _adapters(self, tenant: str) -> list[AdapterDoc]:
        return [document.doc for document in self._catalog.held_adapters(tenant)]
