import msgspec
import pytest
from msgspec.structs import replace

from loraserve.store.codec import DocumentCodec
from loraserve.store.records import Document, DocumentKind, Limits, Status, TenantDoc
from tests.support.store_documents import tenant_document


class OldTenantDoc(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The struct of releases before tenants could be deleted."""

    status: Status = Status.ACTIVE
    description: str = ""
    limits: Limits = Limits()
    weight: float = 1.0
    kv_salt: str


class OldDocument(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    kind: DocumentKind
    id: str
    rev: int
    at: float
    actor: str
    action: str
    request_id: str
    deleted: bool = False
    doc: OldTenantDoc


@pytest.mark.parametrize("limits", [Limits(), Limits(max_adapters=3)])
def test_an_older_release_reads_a_tenant_that_is_not_deleted(limits: Limits) -> None:
    doc = TenantDoc(status=Status.SUSPENDED, description="d", limits=limits, weight=2.0, kv_salt="s")
    document: Document[TenantDoc] = replace(tenant_document("acme", 1), doc=doc)
    old = msgspec.json.decode(DocumentCodec().encode(document), type=OldDocument)
    assert msgspec.structs.asdict(old.doc) == {
        name: getattr(doc, name) for name in ("status", "description", "limits", "weight", "kv_salt")
    }
    restored = replace(document, doc=replace(doc, deleted_at=None, is_erasing=False, erased_at=None))
    assert DocumentCodec().encode(restored) == DocumentCodec().encode(document)


def test_an_older_release_refuses_a_deleted_tenant() -> None:
    document = tenant_document("acme", 1)
    assert isinstance(document.doc, TenantDoc)
    deleted = replace(document, doc=replace(document.doc, deleted_at=1.0))
    with pytest.raises(msgspec.ValidationError, match="deleted_at"):
        msgspec.json.decode(DocumentCodec().encode(deleted), type=OldDocument)
    assert DocumentCodec().decode(DocumentKind.TENANT, DocumentCodec().encode(deleted)) == deleted
