"""The newest known revision of every document, found by what it is about; told to whoever listens."""

from collections.abc import Callable
from typing import cast

from loraserve.store.records import AdapterDoc, AnyDocument, Document, DocumentKind, KeyDoc, TenantDoc

Listener = Callable[[AnyDocument], None]


class DocumentIndex:
    """NOTE: a document never goes back to an older revision here, whatever Redis holds."""

    def __init__(self) -> None:
        self._newest: dict[DocumentKind, dict[str, AnyDocument]] = {kind: {} for kind in DocumentKind}
        self._adapters: dict[str, dict[str, Document[AdapterDoc]]] = {}
        self._listeners: list[Listener] = []

    def get(self, kind: DocumentKind, document_id: str) -> AnyDocument | None:
        return self._newest[kind].get(document_id)

    def all(self, kind: DocumentKind) -> list[AnyDocument]:
        """In no order."""
        return [*self._newest[kind].values()]

    def tenant(self, tenant: str) -> Document[TenantDoc] | None:
        return cast(Document[TenantDoc] | None, self._newest[DocumentKind.TENANT].get(tenant))

    def key(self, key_id: str) -> Document[KeyDoc] | None:
        return cast(Document[KeyDoc] | None, self._newest[DocumentKind.KEY].get(key_id))

    def adapter(self, tenant: str, name: str) -> Document[AdapterDoc] | None:
        """Deleted ones too."""
        return self._adapters.get(tenant, {}).get(name)

    def all_tenants(self) -> list[Document[TenantDoc]]:
        return [cast(Document[TenantDoc], document) for document in self._newest[DocumentKind.TENANT].values()]

    def all_keys(self) -> list[Document[KeyDoc]]:
        """Revoked ones too."""
        return [cast(Document[KeyDoc], document) for document in self._newest[DocumentKind.KEY].values()]

    @property
    def has_keys(self) -> bool:
        """Revoked ones count."""
        return bool(self._newest[DocumentKind.KEY])

    def adapters(self, tenant: str) -> list[Document[AdapterDoc]]:
        """Deleted ones too, in no order."""
        return [*self._adapters.get(tenant, {}).values()]

    def all_adapters(self) -> list[Document[AdapterDoc]]:
        return [cast(Document[AdapterDoc], document) for document in self._newest[DocumentKind.ADAPTER].values()]

    def subscribe(self, listener: Listener) -> None:
        """Called on the event loop after each change, with the new revision. It must not raise."""
        self._listeners.append(listener)

    def apply(self, document: AnyDocument) -> bool:
        """Take in a revision; False if it is not newer than the one known."""
        known = self._newest[document.kind].get(document.id)
        if known is not None and known.rev >= document.rev:
            return False
        self._newest[document.kind][document.id] = document
        if isinstance(document.doc, AdapterDoc):
            adapter = cast(Document[AdapterDoc], document)
            self._adapters.setdefault(adapter.doc.tenant, {})[adapter.doc.name] = adapter
        for listener in self._listeners:
            listener(document)
        return True
