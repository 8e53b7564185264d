"""Which adapters a principal may see and change. What it may not see does not exist for it."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from loraserve.control.documents.catalog import Catalog
from loraserve.control.documents.declarations import Declarations
from loraserve.control.tenancy.principal import Principal
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.records import SHARED_TENANT, AdapterDoc, Document, DocumentKind, adapter_id


def adapter_not_found(name: str) -> ServingError:
    return ServingError(ErrorCode.ADAPTER_NOT_FOUND, f"The adapter '{name[:256]}' does not exist.", param="name")


class AdapterAccess:
    """Reads: the acting tenant's adapters and the shared ones; a tenant's own hides a shared one of the same name.

    Writes: only the acting tenant's own; a shared one gives 403, another tenant's the same 404 as a missing one.
    """

    def __init__(self, catalog: Catalog, declarations: Declarations) -> None:
        self._catalog = catalog
        self._declarations = declarations

    def readable(self, principal: Principal) -> list[Document[AdapterDoc]]:
        """Includes deleted ones; in no order. A deleted own one does not hide an undeleted shared one of its name."""
        own = {document.doc.name: document for document in self._catalog.adapters(principal.acting_tenant)}

        def is_hidden(shared: AdapterDoc) -> bool:
            hiding = own.get(shared.name)
            return hiding is not None and (hiding.doc.deleted_at is None or shared.deleted_at is not None)

        shared = [document for document in self._catalog.adapters(SHARED_TENANT) if not is_hidden(document.doc)]
        return [document for document in (*own.values(), *shared) if principal.may_use(document.doc.name)]

    def get(self, principal: Principal, name: str, *, with_deleted: bool = False) -> Document[AdapterDoc]:
        """with_deleted: a deleted one if there is no other. Raises `ServingError` (404)."""
        if principal.may_use(name):
            known = (self._catalog.adapter(tenant, name) for tenant in (principal.acting_tenant, SHARED_TENANT))
            found = sorted(filter(None, known), key=lambda document: document.doc.deleted_at is not None)
            if found and (with_deleted or found[0].doc.deleted_at is None):
                return found[0]
        raise adapter_not_found(name)

    async def read(self, principal: Principal, name: str, *, with_deleted: bool = False) -> Document[AdapterDoc]:
        """As `get`, including whatever any server committed before this call."""
        for tenant in (principal.acting_tenant, SHARED_TENANT):
            await self._catalog.reread(DocumentKind.ADAPTER, adapter_id(tenant, name))
        return self.get(principal, name, with_deleted=with_deleted)

    async def edit(
        self,
        principal: Principal,
        request_id: str,
        name: str,
        action: str,
        change: Callable[[AdapterDoc], AdapterDoc],
        *,
        expected_rev: int | None = None,
        with_deleted: bool = False,
        turn: AbstractAsyncContextManager[None] | None = None,
    ) -> Document[AdapterDoc]:
        """Raises `ServingError`: see `Declarations.edit`; 404 or 403 if it is not the acting tenant's own."""

        def checked(current: Document[AdapterDoc] | None) -> AdapterDoc:
            if current is None or (current.doc.deleted_at is not None and not with_deleted):
                raise self._refused(principal, name)
            return change(current.doc)

        if not principal.may_use(name):
            raise adapter_not_found(name)
        return await self._declarations.edit(
            AdapterDoc,
            adapter_id(principal.acting_tenant, name),
            checked,
            actor=principal.actor,
            action=action,
            request_id=request_id,
            expected_rev=expected_rev,
            turn=turn,
        )

    def _refused(self, principal: Principal, name: str) -> ServingError:
        shared = self._catalog.adapter(SHARED_TENANT, name)
        if shared is None or shared.doc.deleted_at is not None or principal.acting_tenant == SHARED_TENANT:
            return adapter_not_found(name)
        message = f"The adapter '{name}' belongs to '{SHARED_TENANT}'. Changing it needs a key for all tenants ('*') "
        return ServingError(ErrorCode.FORBIDDEN, f"{message}that acts for '{SHARED_TENANT}' (X-Tenant).")
