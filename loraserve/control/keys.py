"""API keys: made, changed, rotated and revoked by admins."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from loraserve.control.api_keys import NewKey, generate_key
from loraserve.control.catalog import Catalog
from loraserve.control.declarations import Declarations
from loraserve.control.limit_checks import NO_LIMITS, check_limits
from loraserve.control.paging import DEFAULT_PAGE, Page, page_of
from loraserve.control.principal import Action, Principal
from loraserve.serving.errors import ErrorCode, ServingError, invalid_value
from loraserve.store.documents import DocumentStore
from loraserve.store.names import ADAPTER_NAME
from loraserve.store.records import (
    ANY_TENANT,
    DEFAULT_TENANT,
    SHARED_TENANT,
    Document,
    DocumentKind,
    KeyDoc,
    Limits,
    Role,
    Status,
    TenantDoc,
)

MAX_NAME_CHARACTERS = 200
MAX_ALLOWED_ADAPTERS = 1000
MAX_GRACE_S = 30 * 86_400.0


@dataclass(frozen=True, slots=True)
class KeyPatch:
    """Only what is set changes."""

    name: str | UnsetType = UNSET
    role: Role | UnsetType = UNSET
    adapters: list[str] | UnsetType | None = UNSET
    limits: Limits | UnsetType = UNSET
    status: Status | UnsetType = UNSET
    """Active or suspended; revoking is `KeyService.revoke`."""
    expires_at: float | UnsetType | None = UNSET
    """Unix time; None = never."""


@dataclass(frozen=True, slots=True)
class IssuedKey:
    document: Document[KeyDoc]
    text: str
    """The whole key, shown this once."""


class KeyService:
    """An admin of one tenant sees and changes that tenant's keys; an admin of all tenants all of them.

    A foreign key is not found, as a missing one. Every method raises `ServingError`; `expected_rev`: 412 when it is not
    the newest revision. Called on the event loop.
    """

    def __init__(self, catalog: Catalog, declarations: Declarations, *, clock: Callable[[], float] = time.time) -> None:
        self._catalog = catalog
        self._declarations = declarations
        self._clock = clock

    def list(
        self, principal: Principal, *, limit: int = DEFAULT_PAGE, cursor: str | None = None
    ) -> Page[Document[KeyDoc]]:
        """Newest first, revoked ones too. An admin of all tenants sees every tenant's."""
        principal.require(Action.ADMINISTER)
        found = [document for document in self._catalog.all_keys() if _may_see(principal, document.doc)]
        found.sort(key=lambda document: (-document.doc.created_at, document.id))
        return page_of(found, lambda document: document.id, limit=limit, cursor=cursor)

    async def read(self, principal: Principal, key_id: str) -> Document[KeyDoc]:
        """With what any server committed before this call."""
        principal.require(Action.ADMINISTER)
        await self._catalog.reread(DocumentKind.KEY, key_id)
        document = self._catalog.key(key_id)
        if document is None or not _may_see(principal, document.doc):
            raise _not_found(key_id)
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
        """tenant: None = the one the principal acts for; `ANY_TENANT` only by an admin of all tenants."""
        principal.require(Action.ADMINISTER)
        tenant = principal.acting_tenant if tenant is None else tenant
        if tenant != principal.tenant and not principal.is_any_tenant:
            raise ServingError(ErrorCode.FORBIDDEN, "You can make keys of your own tenant only.", param="tenant")
        if tenant != ANY_TENANT and self._catalog.tenant(tenant) is None:
            raise ServingError(ErrorCode.NOT_FOUND, f"The tenant '{tenant[:64]}' does not exist.", param="tenant")
        new = generate_key()
        doc = _new_doc(
            new,
            role=role,
            tenant=tenant,
            name=name,
            adapters=adapters,
            limits=limits,
            expires_at=expires_at,
            now=self._clock(),
        )
        _check_no_wider(principal, doc)

        def change(current: Document[KeyDoc] | None) -> KeyDoc:
            assert current is None, "a random key id is taken"
            return doc

        document = await self._edit(principal, request_id, new.id, "key.create", change)
        return IssuedKey(document, new.text)

    async def patch(
        self, principal: Principal, request_id: str, key_id: str, patch: KeyPatch, *, expected_rev: int | None = None
    ) -> Document[KeyDoc]:
        def change(doc: KeyDoc) -> KeyDoc:
            changed = replace(
                doc,
                name=doc.name if isinstance(patch.name, UnsetType) else patch.name,
                role=doc.role if isinstance(patch.role, UnsetType) else patch.role,
                adapters=doc.adapters if isinstance(patch.adapters, UnsetType) else patch.adapters,
                limits=doc.limits if isinstance(patch.limits, UnsetType) else patch.limits,
                status=doc.status if isinstance(patch.status, UnsetType) else patch.status,
                expires_at=doc.expires_at if isinstance(patch.expires_at, UnsetType) else patch.expires_at,
            )
            if changed.status is Status.REVOKED:
                raise invalid_value(
                    "status", "is 'revoked'; it must be 'active' or 'suspended'. Delete the key instead."
                )
            _check(changed, self._clock() if changed.expires_at != doc.expires_at else None)
            _check_no_wider(principal, changed)
            return changed

        return await self._change(principal, request_id, key_id, "key.change", change, expected_rev)

    async def rotate(
        self, principal: Principal, request_id: str, key_id: str, *, grace_s: float, expected_rev: int | None = None
    ) -> IssuedKey:
        """A new secret under the same id; the one before works for another `grace_s`."""
        if not 0 <= grace_s <= MAX_GRACE_S:
            raise invalid_value("grace_s", f"is {grace_s:g}; it must be 0 to {MAX_GRACE_S:g}.")
        new = generate_key(key_id)

        def change(doc: KeyDoc) -> KeyDoc:
            _check_no_wider(principal, doc)
            return replace(
                doc,
                sha256=new.sha256,
                previous_sha256=doc.sha256 if grace_s else None,
                previous_until=self._clock() + grace_s if grace_s else None,
            )

        document = await self._change(principal, request_id, key_id, "key.rotate", change, expected_rev)
        return IssuedKey(document, new.text)

    async def revoke(
        self, principal: Principal, request_id: str, key_id: str, *, expected_rev: int | None = None
    ) -> Document[KeyDoc]:
        """For good. Revoking a revoked key changes nothing."""
        return await self._change(
            principal,
            request_id,
            key_id,
            "key.revoke",
            lambda doc: replace(doc, status=Status.REVOKED),
            expected_rev,
            with_revoked=True,
        )

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
                raise _not_found(key_id)
            if current.doc.status is Status.REVOKED and not with_revoked:
                raise ServingError(
                    ErrorCode.CONFLICT, f"The key '{key_id}' is revoked, which is final. Make a new one."
                )
            return change(current.doc)

        # Before an If-Match is looked at, which would tell that a foreign key exists.
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


def create_key_offline(
    documents: DocumentStore,
    *,
    role: Role,
    tenant: str,
    name: str = "",
    adapters: Sequence[str] | None = None,
    limits: Limits = NO_LIMITS,
    expires_at: float | None = None,
    actor: str = "cli",
    now: float | None = None,
) -> IssuedKey:
    """With nothing but the data directory. A server that runs takes it in within a minute, or at its first use.

    Raises `ServingError`: the tenant does not exist, a value is out of range.
    """
    now = time.time() if now is None else now
    if tenant not in (ANY_TENANT, DEFAULT_TENANT, SHARED_TENANT):
        found = documents.get(DocumentKind.TENANT, tenant)
        if found is None or not isinstance(found.doc, TenantDoc):
            raise ServingError(ErrorCode.NOT_FOUND, f"The tenant '{tenant}' does not exist. Create it first.")
    new = generate_key()
    doc = _new_doc(
        new, role=role, tenant=tenant, name=name, adapters=adapters, limits=limits, expires_at=expires_at, now=now
    )
    document = Document(
        kind=DocumentKind.KEY, id=new.id, rev=1, at=now, actor=actor, action="key.create", request_id="", doc=doc
    )
    documents.commit(document)
    return IssuedKey(document, new.text)


def revoke_key_offline(documents: DocumentStore, key_id: str, *, actor: str = "cli") -> Document[KeyDoc]:
    """With nothing but the data directory. A running server hears of it within a minute.

    Raises `ServingError` (404) and `RevisionTakenError`.
    """
    current = documents.get(DocumentKind.KEY, key_id)
    if current is None or not isinstance(current.doc, KeyDoc):
        raise _not_found(key_id)
    document = Document(
        kind=DocumentKind.KEY,
        id=key_id,
        rev=current.rev + 1,
        at=time.time(),
        actor=actor,
        action="key.revoke",
        request_id="",
        doc=replace(current.doc, status=Status.REVOKED),
    )
    documents.commit(document)
    return document


def _new_doc(
    new: NewKey,
    *,
    role: Role,
    tenant: str,
    name: str,
    adapters: Sequence[str] | None,
    limits: Limits,
    expires_at: float | None,
    now: float,
) -> KeyDoc:
    doc = KeyDoc(
        tenant=tenant,
        role=role,
        name=name,
        adapters=None if adapters is None else [*adapters],
        limits=limits,
        sha256=new.sha256,
        expires_at=expires_at,
        created_at=now,
    )
    _check(doc, now)
    return doc


def _check(doc: KeyDoc, now: float | None) -> None:
    """now: None = an expiry that did not change, which may have passed."""
    if len(doc.name) > MAX_NAME_CHARACTERS:
        raise invalid_value("name", f"has {len(doc.name)} characters; at most {MAX_NAME_CHARACTERS}.")
    if doc.adapters is not None:
        if len(doc.adapters) > MAX_ALLOWED_ADAPTERS:
            raise invalid_value("adapters", f"has {len(doc.adapters)} names; at most {MAX_ALLOWED_ADAPTERS}.")
        for adapter in doc.adapters:
            if not ADAPTER_NAME.fullmatch(adapter):
                raise invalid_value("adapters", f"has {adapter[:80]!r}, which cannot be an adapter's name.")
    if now is not None and doc.expires_at is not None and doc.expires_at <= now:
        raise invalid_value("expires_at", f"is {doc.expires_at:g}, which has passed. It is in Unix seconds.")
    check_limits(doc.limits, of_tenant=False)


def _check_no_wider(principal: Principal, doc: KeyDoc) -> None:
    """Nobody makes a key that may do more than their own."""
    if principal.adapters is None:
        return
    if doc.adapters is None or not principal.adapters.issuperset(doc.adapters):
        message = "Your key may use some adapters only, so the key must list some of those and no others."
        raise ServingError(ErrorCode.FORBIDDEN, message, param="adapters")


def _may_see(principal: Principal, doc: KeyDoc) -> bool:
    return principal.is_any_tenant or doc.tenant == principal.tenant


def _not_found(key_id: str) -> ServingError:
    return ServingError(ErrorCode.NOT_FOUND, f"The key '{key_id[:64]}' does not exist.")
