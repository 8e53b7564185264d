"""Resolves the key that a client sends to a principal. The same checks decide whether a running request may go on."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from loraserve.control.documents.catalog import Catalog
from loraserve.control.documents.tenant_edits import tenant_not_found
from loraserve.control.tenancy.api_keys import hash_key, is_key, try_parse_id
from loraserve.control.tenancy.principal import FLAG_KEY_ID, OPEN_ACTOR, Principal
from loraserve.control.unavailable import not_newest
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.records import (
    ANY_TENANT,
    DEFAULT_TENANT,
    Document,
    DocumentKind,
    DocumentRef,
    KeyDoc,
    Role,
    Status,
)

NO_HASH = "0" * 64


class Authenticator:
    """Called on the event loop."""

    def __init__(
        self, catalog: Catalog, flag_keys: Sequence[str] = (), *, clock: Callable[[], float] = time.time
    ) -> None:
        """flag_keys: from `--api-key`; they may infer for the tenant `default`. If one has a document, that decides."""
        self._catalog = catalog
        self._flag_hashes = [hash_key(key) for key in flag_keys]
        self._flag_ids = {try_parse_id(key) for key in flag_keys}
        self._clock = clock

    @property
    def is_open(self) -> bool:
        """Whether no key is required, because there is none and never was."""
        return not self._flag_hashes and not self._catalog.has_keys

    @property
    def has_admin(self) -> bool:
        """Whether there is an active admin key for all tenants (`*`)."""
        return self.newest_admin is not None

    @property
    def newest_admin(self) -> str | None:
        """Id of the most recently created active admin key for all tenants (`*`)."""
        admins = [
            document
            for document in self._catalog.all_keys()
            if document.doc.role is Role.ADMIN and document.doc.tenant == ANY_TENANT and self._is_active(document.doc)
        ]
        return max(admins, key=lambda document: document.doc.created_at).id if admins else None

    async def authenticate(self, text: str | None, acting_tenant: str | None = None) -> Principal:
        """text: the key as sent. acting_tenant: `X-Tenant`. Raises `ServingError`: 401, 403 or 404."""
        if self.is_open:
            principal = Principal(OPEN_ACTOR, Role.ADMIN, ANY_TENANT, DEFAULT_TENANT)
        elif not text:
            raise _refused("No API key was sent. Send one as 'Authorization: Bearer ls-…'.")
        elif self._is_flag_secret(text) and not self._is_declared(text):
            principal = Principal(FLAG_KEY_ID, Role.INFER, DEFAULT_TENANT, DEFAULT_TENANT)
        else:
            principal = await self._of_text(text)
        return await self._act_for(principal, acting_tenant)

    def is_flag(self, key_id: str) -> bool:
        """Whether the key was also given as `--api-key`. If it has a document, that decides what it may do."""
        return key_id in self._flag_ids

    def _is_flag_secret(self, text: str) -> bool:
        # NOTE: compare all of them, so that timing reveals nothing.
        return sum(is_key(text, flag) for flag in self._flag_hashes) > 0

    def _is_declared(self, text: str) -> bool:
        """Whether a `--api-key` has a document. The commands send `LORASERVE_API_KEY`, and a server started in the same
        environment takes that key as a `--api-key`."""
        key_id = try_parse_id(text)
        if key_id is None:
            return False
        ref = (DocumentKind.KEY, key_id)
        # If the data directory is an older copy, perhaps only Redis knows the document.
        return self._catalog.get(*ref) is not None or self._catalog.is_behind(ref)

    async def of_key(self, key_id: str, acting_tenant: str | None = None, *, sha256: str | None = None) -> Principal:
        """For callers that use this key without sending it. Raises `ServingError`.

        sha256: hash of the secret that the session or link was made with, which must still work; None = the newest.
        """
        document = self._catalog.key(key_id)
        if document is None or not self._is_good(document.doc, sha256):
            document = await self._newest_key(key_id)
        if document is None or not self._is_good(document.doc, sha256):
            raise _refused("The API key of this session was rotated or no longer works. Log in again.")
        principal = self._principal(document, document.doc.sha256 if sha256 is None else sha256)
        return await self._act_for(principal, acting_tenant)

    def newest_sha256(self, key_id: str) -> str:
        """Hash of a known key's newest secret."""
        document = self._catalog.key(key_id)
        assert document is not None
        return document.doc.sha256

    def current(self, principal: Principal) -> Principal:
        """The same principal by the newest documents. Raises `ServingError` if its running work may not go on.

        A rotation does not end work that began before it. Work that began with the old secret ends with the grace time.
        """
        if principal.is_open and not self.is_open:
            raise _refused("This server now requires an API key. Send one as 'Authorization: Bearer ls-…'.")
        if principal.key_id is None:
            self._check_tenant(principal)
            return principal
        document = self._catalog.key(principal.key_id)
        if document is None or not self._is_active(document.doc):
            raise _refused("The API key was revoked, was suspended or has expired.")
        if principal.is_old_secret and not self._works_with(document.doc, principal.key_sha256):
            raise _rotated()
        newest = replace(self._principal(document, principal.key_sha256), acting_tenant=principal.acting_tenant)
        if not newest.is_any_tenant and newest.acting_tenant != newest.tenant:
            raise _refused("The API key now belongs to another tenant.")
        self._check_tenant(newest)
        return newest

    def newest(self, principal: Principal) -> Principal:
        """As `current`, for work that has not begun: also refused if its secret was rotated out since (401), or if
        Redis has a newer revision of its key or tenant than the disk (503)."""
        newest = self.current(principal)
        document = None if newest.key_id is None else self._catalog.key(newest.key_id)
        if document is not None and not self._works_with(document.doc, newest.key_sha256):
            raise _rotated()
        if any(self._catalog.is_behind(ref) for ref in _decided_by(newest)):
            raise not_newest("your key or its tenant")
        return newest

    async def confirm(self, principal: Principal) -> Principal:
        """`newest`, after querying Redis; while Redis is gone, its last answers count."""
        await self._catalog.try_query_revs(_decided_by(principal))
        return self.newest(principal)

    async def confirm_if_behind(self, principal: Principal) -> Principal:
        """As `confirm`, for work that is admitted later: queries Redis only about documents it has reported newer."""
        await self._catalog.try_query_revs([ref for ref in _decided_by(principal) if self._catalog.is_behind(ref)])
        return self.newest(principal)

    async def reread(self, principal: Principal) -> None:
        """Afterwards `newest` reflects whatever any server committed for its key and tenant before this call, and the
        limits of the tenant that it acts for are as recent."""
        refs = _decided_by(principal)
        for ref in {*refs, (DocumentKind.TENANT, principal.acting_tenant)}:
            await self._catalog.reread(*ref)
        await self._catalog.try_query_revs(refs)

    async def _of_text(self, text: str) -> Principal:
        key_id = try_parse_id(text)
        document = self._catalog.key(key_id) if key_id is not None else None
        if key_id is not None and (
            document is None or not is_key(text, document.doc.sha256) or not self._is_active(document.doc)
        ):
            document = await self._newest_key(key_id)
        doc = document.doc if document is not None else None
        is_newest = is_key(text, doc.sha256 if doc is not None else NO_HASH)
        is_previous = is_key(text, (doc.previous_sha256 if doc is not None else None) or NO_HASH)
        if document is None or doc is None or not (is_newest or (is_previous and self._is_old_secret_good(doc))):
            raise _refused("The API key is not known. Check that you copied all of it.")
        if not self._is_active(doc):
            raise _refused("The API key was revoked, was suspended or has expired. Ask an admin for another.")
        return self._principal(document, hash_key(text))

    async def _newest_key(self, key_id: str) -> Document[KeyDoc] | None:
        """Read from disk: another process may have just created, rotated or resumed the key, or restored its tenant."""
        document = await self._catalog.try_refresh(DocumentKind.KEY, key_id)
        if document is not None and isinstance(document.doc, KeyDoc) and self._catalog.is_deleted(document.doc.tenant):
            await self._catalog.try_refresh(DocumentKind.TENANT, document.doc.tenant)
        return self._catalog.key(key_id)

    async def _learn_tenant(self, principal: Principal, acting_tenant: str | None) -> None:
        """Read from disk if unknown or suspended: another process may have just created or resumed it."""
        tenant = acting_tenant if acting_tenant is not None and principal.is_any_tenant else principal.acting_tenant
        document = self._catalog.tenant(tenant)
        if document is None or document.doc.status is not Status.ACTIVE:
            await self._catalog.try_refresh(DocumentKind.TENANT, tenant)

    async def _act_for(self, principal: Principal, acting_tenant: str | None) -> Principal:
        await self._learn_tenant(principal, acting_tenant)
        if acting_tenant is not None and acting_tenant != principal.acting_tenant:
            if not principal.is_any_tenant:
                message = "X-Tenant names a tenant other than your key's. Only a key for all tenants ('*') may do that."
                raise ServingError(ErrorCode.FORBIDDEN, message)
            if self._catalog.tenant(acting_tenant) is None:
                message = f"X-Tenant: the tenant '{acting_tenant[:64]}' does not exist."
                raise ServingError(ErrorCode.NOT_FOUND, message, param="X-Tenant")
            principal = replace(principal, acting_tenant=acting_tenant)
        self._check_tenant(principal)
        return principal

    def _check_tenant(self, principal: Principal) -> None:
        """A key for all tenants (`*`) can still read a suspended tenant; an admin key can also lift the suspension."""
        if not principal.is_any_tenant:
            check_not_suspended(self._catalog, principal.acting_tenant)

    def _is_active(self, doc: KeyDoc) -> bool:
        return doc.status is Status.ACTIVE and (doc.expires_at is None or self._clock() < doc.expires_at)

    def _is_good(self, doc: KeyDoc, sha256: str | None) -> bool:
        """Whether the key works, and works with the secret of this hash; None = the newest."""
        return self._is_active(doc) and (sha256 is None or self._works_with(doc, sha256))

    def _works_with(self, doc: KeyDoc, sha256: str | None) -> bool:
        is_old = sha256 == doc.previous_sha256 and self._is_old_secret_good(doc)
        return sha256 == doc.sha256 or is_old

    def _is_old_secret_good(self, doc: KeyDoc) -> bool:
        return doc.previous_until is not None and self._clock() < doc.previous_until

    @staticmethod
    def _principal(document: Document[KeyDoc], sha256: str | None) -> Principal:
        doc = document.doc
        return Principal(
            actor=document.id,
            role=doc.role,
            tenant=doc.tenant,
            acting_tenant=DEFAULT_TENANT if doc.tenant == ANY_TENANT else doc.tenant,
            key_id=document.id,
            key_rev=document.rev,
            adapters=None if doc.adapters is None else frozenset(doc.adapters),
            key_sha256=sha256,
            is_old_secret=sha256 != doc.sha256,
        )


def _decided_by(principal: Principal) -> list[DocumentRef]:
    """The documents that decide what the principal may do."""
    refs: list[DocumentRef] = [] if principal.key_id is None else [(DocumentKind.KEY, principal.key_id)]
    return refs if principal.is_any_tenant else [*refs, (DocumentKind.TENANT, principal.acting_tenant)]


def check_not_suspended(catalog: Catalog, tenant: str) -> None:
    """Raises `ServingError`."""
    document = catalog.tenant(tenant)
    if document is None:
        raise tenant_not_found(tenant)
    if document.doc.status is not Status.ACTIVE:
        raise ServingError(ErrorCode.TENANT_SUSPENDED, f"The tenant '{tenant}' is suspended.")


def _rotated() -> ServingError:
    return _refused("The API key was rotated, and the grace period of the old one is over.")


def _refused(message: str) -> ServingError:
    return ServingError(ErrorCode.INVALID_API_KEY, message)
