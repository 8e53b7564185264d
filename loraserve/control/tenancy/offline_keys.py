"""Creates and revokes keys with only the data directory, whether or not a server runs on it.

A server that runs on it notices within two seconds and notifies all others on its Redis.
"""

import time
from collections.abc import Sequence

from msgspec.structs import replace

from loraserve.control.tenancy.api_keys import generate_key
from loraserve.control.tenancy.key_documents import IssuedKey, key_not_found, new_doc
from loraserve.control.tenancy.limit_checks import NO_LIMITS
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.documents import DocumentStore
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

ACTOR = "cli"


def create_key_offline(
    documents: DocumentStore,
    *,
    role: Role,
    tenant: str,
    name: str = "",
    adapters: Sequence[str] | None = None,
    limits: Limits = NO_LIMITS,
    expires_at: float | None = None,
) -> IssuedKey:
    """Raises `ServingError`: the tenant does not exist, a value is out of range."""
    now = time.time()
    if tenant not in (ANY_TENANT, DEFAULT_TENANT, SHARED_TENANT):
        found = documents.get(DocumentKind.TENANT, tenant)
        if found is None or not isinstance(found.doc, TenantDoc):
            raise ServingError(ErrorCode.NOT_FOUND, f"The tenant '{tenant}' does not exist. Create it first.")
        if found.doc.deleted_at is not None:
            raise ServingError(ErrorCode.NOT_FOUND, f"The tenant '{tenant}' was deleted.")
    new = generate_key()
    doc = new_doc(
        new, role=role, tenant=tenant, name=name, adapters=adapters, limits=limits, expires_at=expires_at, now=now
    )
    document = Document(
        kind=DocumentKind.KEY,
        id=new.id,
        rev=documents.first_rev(DocumentKind.KEY),
        at=now,
        actor=ACTOR,
        action="key.create",
        request_id="",
        doc=doc,
    )
    documents.commit(document)
    return IssuedKey(document, new.text)


def revoke_key_offline(documents: DocumentStore, key_id: str) -> Document[KeyDoc]:
    """Requests that run with it end. Raises `ServingError` (404) and `RevisionTakenError`."""
    current = documents.get(DocumentKind.KEY, key_id)
    if current is None or not isinstance(current.doc, KeyDoc):
        raise key_not_found(key_id)
    document = Document(
        kind=DocumentKind.KEY,
        id=key_id,
        rev=current.rev + 1,
        at=time.time(),
        actor=ACTOR,
        action="key.revoke",
        request_id="",
        doc=replace(current.doc, status=Status.REVOKED),
    )
    documents.commit(document)
    return document
