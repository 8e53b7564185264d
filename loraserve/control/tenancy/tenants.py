"""Tenants: created and changed with an admin key for all tenants (`*`)."""

import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from loraserve.control.documents.catalog import Catalog
from loraserve.control.documents.declarations import Declarations
from loraserve.control.documents.tenant_edits import id_taken, tenant_not_found
from loraserve.control.paging import DEFAULT_PAGE, Order, Page, page_of
from loraserve.control.tenancy.limit_checks import NO_LIMITS, check_limits
from loraserve.control.tenancy.principal import Action, Principal
from loraserve.control.tenancy.quota import Quota
from loraserve.serving.errors import invalid_value
from loraserve.store.errors import InvalidNameError
from loraserve.store.names import check_tenant_name
from loraserve.store.records import DEFAULT_TENANT, SHARED_TENANT, Document, DocumentKind, Limits, Status, TenantDoc

MAX_DESCRIPTION_CHARACTERS = 2000
MAX_WEIGHT = 1000.0
BY_ID: Order[Document[TenantDoc]] = Order("tenants", lambda document: document.id, lambda document: document.id)
SERVER_ACTOR = "server"


@dataclass(frozen=True, slots=True)
class TenantPatch:
    """Unset fields stay as they are."""

    description: str | UnsetType = UNSET
    status: Status | UnsetType = UNSET
    """Active or suspended."""
    limits: Limits | UnsetType = UNSET
    weight: float | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class TenantHoldings:
    """What restoring a deleted tenant brings back."""

    num_adapters: int
    adapter_bytes: int
    """Over all versions, including deleted ones while they are on disk; content shared with others counts in full."""
    num_keys: int
    """Without revoked ones."""


class TenantService:
    """Every method raises `ServingError`. Without a key for all tenants (`*`), a principal sees only its own tenant.

    Called on the event loop.
    """

    def __init__(
        self,
        catalog: Catalog,
        declarations: Declarations,
        quota: Quota,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._catalog = catalog
        self._declarations = declarations
        self._quota = quota
        self._clock = clock

    async def ensure_builtin(self) -> None:
        """Afterwards `default` and `shared` exist. All documents must be known before.

        NOTE: existing ones are not edited: on an older copy of a data directory that would fail, and with it the start.
        """
        for tenant in (DEFAULT_TENANT, SHARED_TENANT):
            if self._catalog.known_tenant(tenant) is not None:
                continue
            await self._declarations.edit(
                TenantDoc,
                tenant,
                lambda current: _new_doc() if current is None else current.doc,
                actor=SERVER_ACTOR,
                action="tenant.create",
                request_id="",
            )

    def list(
        self, principal: Principal, *, deleted: bool = False, limit: int = DEFAULT_PAGE, cursor: str | None = None
    ) -> Page[Document[TenantDoc]]:
        """By id. deleted: only deleted ones, including erased ones; otherwise only the others."""
        principal.require(Action.READ)
        found = [
            document
            for document in self._catalog.known_tenants()
            if _may_see(principal, document.id) and (document.doc.deleted_at is not None) == deleted
        ]
        return page_of(found, BY_ID, limit=limit, cursor=cursor)

    async def read(self, principal: Principal, tenant: str) -> Document[TenantDoc]:
        """Includes whatever any server committed before this call, and deleted tenants."""
        principal.require(Action.READ)
        await self._catalog.reread(DocumentKind.TENANT, tenant)
        document = self._catalog.known_tenant(tenant)
        if document is None or not _may_see(principal, tenant):
            raise tenant_not_found(tenant)
        return document

    def holdings(self, tenant: str) -> TenantHoldings:
        return TenantHoldings(
            self._quota.num_adapters(tenant),
            self._quota.adapter_bytes(tenant),
            sum(key.doc.status is not Status.REVOKED for key in self._catalog.held_keys(tenant)),
        )

    async def create(
        self,
        principal: Principal,
        request_id: str,
        tenant: str,
        *,
        description: str = "",
        limits: Limits = NO_LIMITS,
        weight: float = 1.0,
    ) -> Document[TenantDoc]:
        principal.require(Action.ADMINISTER_ALL)
        try:
            check_tenant_name(tenant)
        except InvalidNameError as error:
            raise invalid_value("id", f"is refused: {error}.") from None
        doc = replace(_new_doc(), description=description, limits=limits, weight=weight)
        _check(doc)

        def change(current: Document[TenantDoc] | None) -> TenantDoc:
            if current is not None:
                raise id_taken(current, self._clock())
            return doc

        return await self._edit(principal, request_id, tenant, "tenant.create", change)

    async def patch(
        self,
        principal: Principal,
        request_id: str,
        tenant: str,
        patch: TenantPatch,
        *,
        expected_rev: int | None = None,
    ) -> Document[TenantDoc]:
        principal.require(Action.ADMINISTER_ALL)

        def change(current: Document[TenantDoc] | None) -> TenantDoc:
            if current is None or current.doc.deleted_at is not None:
                raise tenant_not_found(tenant)
            doc = current.doc
            doc = replace(
                doc,
                description=doc.description if isinstance(patch.description, UnsetType) else patch.description,
                status=doc.status if isinstance(patch.status, UnsetType) else patch.status,
                limits=doc.limits if isinstance(patch.limits, UnsetType) else patch.limits,
                weight=doc.weight if isinstance(patch.weight, UnsetType) else patch.weight,
            )
            _check(doc)
            return doc

        await self.read(principal, tenant)
        return await self._edit(principal, request_id, tenant, "tenant.change", change, expected_rev)

    async def _edit(
        self,
        principal: Principal,
        request_id: str,
        tenant: str,
        action: str,
        change: Callable[[Document[TenantDoc] | None], TenantDoc],
        expected_rev: int | None = None,
    ) -> Document[TenantDoc]:
        return await self._declarations.edit(
            TenantDoc,
            tenant,
            change,
            actor=principal.actor,
            action=action,
            request_id=request_id,
            expected_rev=expected_rev,
        )


def _new_doc() -> TenantDoc:
    return TenantDoc(kv_salt=secrets.token_hex(16))


def _check(doc: TenantDoc) -> None:
    if doc.status is Status.REVOKED:
        raise invalid_value("status", "is 'revoked'; a tenant is 'active' or 'suspended'.")
    if len(doc.description) > MAX_DESCRIPTION_CHARACTERS:
        count = len(doc.description)
        raise invalid_value("description", f"has {count} characters; at most {MAX_DESCRIPTION_CHARACTERS} are allowed.")
    if not (math.isfinite(doc.weight) and 0 < doc.weight <= MAX_WEIGHT):
        raise invalid_value("weight", f"is {doc.weight}; it must be more than 0 and at most {MAX_WEIGHT:g}.")
    check_limits(doc.limits, of_tenant=True)


def _may_see(principal: Principal, tenant: str) -> bool:
    return principal.is_any_tenant or tenant == principal.tenant
