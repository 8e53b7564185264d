"""What the data directory still contains of erased tenants, besides their own documents, usage and contents."""

from dataclasses import dataclass
from pathlib import Path

from loraserve.store.documents import DocumentStore, log_damage
from loraserve.store.errors import DamagedFileError
from loraserve.store.records import DocumentKind, TenantDoc, is_a
from loraserve.store.uploads import UploadStore

HELD_KINDS = (DocumentKind.KEY, DocumentKind.ADAPTER)


@dataclass(frozen=True, slots=True)
class Found:
    tenants: set[str]
    """Those that are being erased or were, according to the disk, whatever is in memory."""
    documents: dict[DocumentKind, list[str]]
    uploads: list[str]
    is_all: bool
    """False: something cannot be read and may be theirs."""


class Remains:
    """Synchronous. NOTE: the only caller of `DocumentStore.remove`; the ids of these documents are never reused."""

    def __init__(self, data_dir: Path, uploads: UploadStore) -> None:
        self._documents = DocumentStore(data_dir, on_damage=self._on_damage)
        self._uploads = uploads
        self._is_all = True

    def find(self, tenants: set[str]) -> Found:
        self._is_all = True
        tenants = {tenant for tenant in tenants if self._is_erasing(tenant)}
        documents = {kind: self._ids(kind, tenants) for kind in HELD_KINDS}
        uploads = [session.id for session in self._uploads.sessions() if session.tenant in tenants]
        return Found(tenants, documents, uploads, self._is_all)

    def remove(self, kind: DocumentKind, document_ids: list[str]) -> None:
        for document_id in document_ids:
            self._documents.remove(kind, document_id)

    def remove_uploads(self, upload_ids: list[str]) -> None:
        for upload_id in upload_ids:
            self._uploads.remove(upload_id)

    def forget_history(self, tenants: set[str]) -> None:
        """Remove older revisions of their own documents, and what killed servers left of documents being removed."""
        for tenant in tenants:
            self._documents.forget_older(DocumentKind.TENANT, tenant)
        self._documents.empty_trash()

    def _is_erasing(self, tenant: str) -> bool:
        try:
            document = self._documents.get(DocumentKind.TENANT, tenant)
        except DamagedFileError as damage:
            log_damage(damage)
            return False
        return is_a(document, TenantDoc) and document.doc.is_erasing

    def _ids(self, kind: DocumentKind, tenants: set[str]) -> list[str]:
        return [
            document.id
            for document in self._documents.scan(kind)
            if not isinstance(document.doc, TenantDoc) and document.doc.tenant in tenants
        ]

    def _on_damage(self, damage: DamagedFileError) -> None:
        log_damage(damage)
        self._is_all = False
