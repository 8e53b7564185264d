"""API keys: admins create, change, rotate and revoke them."""

import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from loraserve.control.documents.catalog import Catalog
from loraserve.control.documents.declarations import Declarations
from loraserve.control.documents.tenant_edits import tenant_not_found
from loraserve.control.paging import DEFAULT_PAGE, Order, Page, page_of
from loraserve.control.tenancy.api_keys import generate_key
from loraserve.control.tenancy.key_documents import (
    IssuedKey,
    KeyPatch,
    gone_since,
    key_not_found,
    new_doc,
    patched,
    rotated,
)
from loraserve.control.tenancy.limit_checks import NO_LIMITS
from loraserve.control.tenancy.principal import Action, Principal
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.records import ANY_TENANT, Document, DocumentKind, KeyDoc, Limits, Role, Status

MAX_KEYS = 1000
"""Per tenant, and for keys of all tenants (`*`); revoked and expired keys do not count. Approximate: requests at the
same moment may exceed it."""
NEWEST_FIRST: Order[Document[KeyDoc]] = Order(
    "keys", lambda document: document.doc.created_at, lambda document: document.id, is_down=True
)


class KeyService:
    """An admin of one tenant sees and changes that tenant's keys; an admin key for all tenants (`*`), all of them.

    Another tenant's key is not found, like a missing one. Every method raises `ServingError`; `expected_rev`: 412 if it
    is not the newest revision. Called on the event loop.
    """

    def __init__(self, catalog: Catalog, declarations: Declarations, *, clock: Callable[[], float] = time.time) -> None:
        self._catalog = catalog
        self._declarations = declarations
        self._clock = clock

    def list(
        self, principal: Principal, *, tenant: str | None = None, limit: int = DEFAULT_PAGE, cursor: str | None = None
    ) -> Page[Document[KeyDoc]]:
        """Newest first, revoked ones too. An admin key for all tenants (`*`) sees all, or those of `tenant`."""
        principal.require(Action.ADMINISTER)
        found = [
            document
            for document in self._catalog.all_keys()
            if _may_see(principal, document.doc) and tenant in (None, document.doc.tenant)
        ]
        return page_of(found, NEWEST_FIRST, limit=limit, cursor=cursor)

    async def read(self, principal: Principal, key_id: str) -> Document[KeyDoc]:
        """Includes whatever any server committed before this call."""
        principal.require(Action.ADMINISTER)
        await self._catalog.reread(DocumentKind.KEY, key_id)
        document = self._catalog.key(key_id)
        if document is None or not _may_see(principal, document.doc):
            raise key_not_found(key_id)
        return document

    async def read_delegable(self, principal: Principal, key_id: str) -> Document[KeyDoc]:
        """A key whose rights the principal may pass on: as `read`, and only if they are no wider than its own."""
        document = await self.read(principal, key_id)
        _check_no_wider(principal, document.doc)
        return document

    async def create(
        self,
        principal: Principal,
        request_id: str,
        *,
        role: Role,
        tenant: str | None = None,
        name: str = "",
        adapters: Sequence[str] | None = None,
        limits: Limits = NO_LIMITS,
        expires_at: float | None = None,
    ) -> IssuedKey:
        """tenant: None = the one the principal acts for; `ANY_TENANT` only with an admin key for all tenants."""
        principal.require(Action.ADMINISTER)
        tenant = principal.acting_tenant if tenant is None else tenant
        if tenant != principal.tenant and not principal.is_any_tenant:
            raise ServingError(ErrorCode.FORBIDDEN, "You can create keys only for your own tenant.", param="tenant")
        if tenant != ANY_TENANT and self._catalog.tenant(tenant) is None:
            raise tenant_not_found(tenant, "tenant")
        new, now = generate_key(), self._clock()
        doc = new_doc(
            new,
            role=role,
            tenant=tenant,
            name=name,
            adapters=adapters,
            limits=limits,
            expires_at=expires_at,
            now=now,
        )
        _check_no_wider(principal, doc)
        self._check_room(tenant, now)

        def change(current: Document[KeyDoc] | None) -> KeyDoc:
            assert current is None, "a random key id is taken"
            return doc

        document = await self._edit(principal, request_id, new.id, "key.create", change)
        return IssuedKey(document, new.text)

    async def patch(
        self, principal: Principal, request_id: str, key_id: str, patch: KeyPatch, *, expected_rev: int | None = None
    ) -> Document[KeyDoc]:
        def change(doc: KeyDoc) -> KeyDoc:
            _check_no_wider(principal, doc)
            now = self._clock()
            changed = patched(doc, patch, now)
            _check_no_wider(principal, changed)
            had_expired = doc.expires_at is not None and now >= doc.expires_at
            if had_expired and changed.expires_at != doc.expires_at:
                self._check_room(doc.tenant, now)
            return changed

        return await self._change(principal, request_id, key_id, "key.change", change, expected_rev)

    async def rotate(
        self, principal: Principal, request_id: str, key_id: str, *, grace_s: float, expected_rev: int | None = None
    ) -> IssuedKey:
        """A new secret under the same id; the previous one works for another `grace_s`."""
        new = generate_key(key_id)

        def change(doc: KeyDoc) -> KeyDoc:
            _check_no_wider(principal, doc)
            return rotated(doc, new, grace_s, self._clock())

        document = await self._change(principal, request_id, key_id, "key.rotate", change, expected_rev)
        return IssuedKey(document, new.text)

    async def revoke(
        self, principal: Principal, request_id: str, key_id: str, *, expected_rev: int | None = None
    ) -> Document[KeyDoc]:
        """Final. Revoking a revoked key changes nothing. Every admin key can revoke itself."""

        def change(doc: KeyDoc) -> KeyDoc:
            if key_id != principal.key_id:
                _check_no_wider(principal, doc)
            return replace(doc, status=Status.REVOKED)

        return await self._change(
            principal,
            request_id,
            key_id,
            "key.revoke",
            change,
            expected_rev,
            with_revoked=True,
        )

    def _check_room(self, tenant: str, now: float) -> None:
        """Whether the tenant may have one more key. Raises `ServingError` (429)."""
        num_keys = sum(gone_since(key, now) is None for key in self._catalog.held_keys(tenant))
        if num_keys >= MAX_KEYS:
            raise _too_many_keys(tenant, num_keys)

    async def _change(
        self,
        principal: Principal,
        request_id: str,
        key_id: str,
        action: str,
        change: Callable[[KeyDoc], KeyDoc],
        expected_rev: int | None,
        *,
        with_revoked: bool = False,
    ) -> Document[KeyDoc]:
        def checked(current: Document[KeyDoc] | None) -> KeyDoc:
            if current is None or not _may_see(principal, current.doc):
                raise key_not_found(key_id)
            if current.doc.status is Status.REVOKED and not with_revoked:
                raise ServingError(
                    ErrorCode.CONFLICT, f"The key '{key_id}' is revoked, which is final. Make a new one."
                )
            return change(current.doc)

        # Before If-Match is checked: a 412 would reveal that another tenant's key exists.
        await self.read(principal, key_id)
        return await self._edit(principal, request_id, key_id, action, checked, expected_rev)

    async def _edit(
        self,
        principal: Principal,
        request_id: str,
        key_id: str,
        action: str,
        change: Callable[[Document[KeyDoc] | None], KeyDoc],
        expected_rev: int | None = None,
    ) -> Document[KeyDoc]:
        return await self._declarations.edit(
            KeyDoc,
            key_id,
            change,
            actor=principal.actor,
            action=action,
            request_id=request_id,
            expected_rev=expected_rev,
        )


def _too_many_keys(tenant: str, num_keys: int) -> ServingError:
    whose = "for all tenants ('*')" if tenant == ANY_TENANT else f"of the tenant '{tenant}'"
    message = (
        f"There are {num_keys} keys {whose} that are neither revoked nor expired; at most {MAX_KEYS} are allowed. "
        "Revoke keys that are no longer needed, or create keys that expire."
    )
    return ServingError(ErrorCode.INSUFFICIENT_QUOTA, message)


def _check_no_wider(principal: Principal, doc: KeyDoc) -> None:
    """No principal may create, change, revoke or lend a key with wider rights than its own."""
    if principal.adapters is None:
        return
    if doc.adapters is None or not principal.adapters.issuperset(doc.adapters):
        message = "Your key may use only some adapters, so this key must list only adapters from among those."
        raise ServingError(ErrorCode.FORBIDDEN, message, param="adapters")


def _may_see(principal: Principal, doc: KeyDoc) -> bool:
    return principal.is_any_tenant or doc.tenant == principal.tenant
