"""An index of the newest known revision of every document, with listeners for changes.

What a deleted tenant owned does not exist for callers: no key, no adapter, not the tenant itself. Only methods that say
so include it, for restoring, erasing and billing.
"""

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from loraserve.store.records import AdapterDoc, AnyDocument, Document, DocumentKind, KeyDoc, TenantDoc, adapter_id, is_a

Listener = Callable[[AnyDocument], None]


class DocumentIndex:
    """NOTE: a document's revision never decreases here, whatever Redis contains."""

    def __init__(self) -> None:
        self._newest: dict[DocumentKind, dict[str, AnyDocument]] = {kind: {} for kind in DocumentKind}
        self._tenants: dict[str, Document[TenantDoc]] = {}
        self._adapters: dict[str, dict[str, Document[AdapterDoc]]] = {}
        self._keys: dict[str, dict[str, Document[KeyDoc]]] = {}
        """By tenant, which never changes for a key, and id."""
        self._had_keys = False
        self._listeners: list[Listener] = []

    def get(self, kind: DocumentKind, document_id: str) -> AnyDocument | None:
        """Includes those of deleted tenants."""
        return self._newest[kind].get(document_id)

    def all(self, kind: DocumentKind) -> list[AnyDocument]:
        """Includes those of deleted tenants; in no order."""
        return [*self._newest[kind].values()]

    def tenant(self, tenant: str) -> Document[TenantDoc] | None:
        return None if self.is_deleted(tenant) else self.known_tenant(tenant)

    def known_tenant(self, tenant: str) -> Document[TenantDoc] | None:
        """Includes deleted ones."""
        return self._tenants.get(tenant)

    def is_deleted(self, tenant: str) -> bool:
        """Whether it was deleted, restorable or not."""
        document = self.known_tenant(tenant)
        return document is not None and document.doc.deleted_at is not None

    def is_erased(self, document: AnyDocument) -> bool:
        """Whether it belongs to a tenant that is being erased, or was; such documents are kept nowhere."""
        doc = document.doc
        tenant = None if isinstance(doc, TenantDoc) else self.known_tenant(doc.tenant)
        return tenant is not None and tenant.doc.is_erasing

    def key(self, key_id: str) -> Document[KeyDoc] | None:
        document = self._newest[DocumentKind.KEY].get(key_id)
        return document if is_a(document, KeyDoc) and not self.is_deleted(document.doc.tenant) else None

    def adapter(self, tenant: str, name: str) -> Document[AdapterDoc] | None:
        """Deleted ones too."""
        return None if self.is_deleted(tenant) else self._adapters.get(tenant, {}).get(name)

    def all_tenants(self) -> list[Document[TenantDoc]]:
        return [document for document in self.known_tenants() if document.doc.deleted_at is None]

    def known_tenants(self) -> list[Document[TenantDoc]]:
        """Deleted ones too."""
        return [*self._tenants.values()]

    def all_keys(self) -> list[Document[KeyDoc]]:
        """Revoked ones too."""
        return [
            document for tenant, keys in self._keys.items() if not self.is_deleted(tenant) for document in keys.values()
        ]

    def held_keys(self, tenant: str) -> list[Document[KeyDoc]]:
        """Includes revoked ones, and those of a deleted tenant as long as it can be restored."""
        return [*self._keys.get(tenant, {}).values()]

    @property
    def has_keys(self) -> bool:
        """Whether there is or was a key; revoked ones and those of erased tenants count."""
        return self._had_keys

    def adapters(self, tenant: str) -> list[Document[AdapterDoc]]:
        """Deleted ones too, in no order."""
        return [] if self.is_deleted(tenant) else self.held_adapters(tenant)

    def held_adapters(self, tenant: str) -> list[Document[AdapterDoc]]:
        """Includes deleted ones, and those of a deleted tenant as long as it can be restored."""
        return [*self._adapters.get(tenant, {}).values()]

    def all_adapters(self) -> list[Document[AdapterDoc]]:
        return [
            document
            for tenant, adapters in self._adapters.items()
            if not self.is_deleted(tenant)
            for document in adapters.values()
        ]

    def subscribe(self, listener: Listener) -> None:
        """Call `listener` on the event loop after each change, with the new revision. It must not raise.

        Deleting or restoring a tenant also changes its adapters: the listener is called once more for each.
        """
        self._listeners.append(listener)

    def apply(self, document: AnyDocument) -> bool:
        """Take in a revision; False if it is not newer than the known one, or its tenant's are no longer kept."""
        known = self._newest[document.kind].get(document.id)
        self._had_keys = self._had_keys or document.kind is DocumentKind.KEY
        if (known is not None and known.rev >= document.rev) or self.is_erased(document):
            return False
        was_deleted = self.is_deleted(document.id)
        self._newest[document.kind][document.id] = document
        changed: list[AnyDocument] = [document]
        if is_a(document, AdapterDoc):
            self._adapters.setdefault(document.doc.tenant, {})[document.doc.name] = document
        elif is_a(document, KeyDoc):
            self._keys.setdefault(document.doc.tenant, {})[document.id] = document
        elif is_a(document, TenantDoc):
            self._tenants[document.id] = document
            if was_deleted != self.is_deleted(document.id):
                changed += self.held_adapters(document.id)
            if document.doc.is_erasing:
                self._drop(document.id)
        self._notify(changed)
        return True

    def withdraw(self, key: Document[KeyDoc]) -> None:
        """Hide the key from callers until a revision is applied again; listeners are called once more for it."""
        del self._newest[DocumentKind.KEY][key.id]
        del self._keys[key.doc.tenant][key.id]
        self._notify([key])

    def forget(self, document: AnyDocument) -> bool:
        """Remove a key or adapter that was retired. False if another revision is known.

        Listeners are called once more for it; an adapter is then passed as deleted and empty.
        """
        doc = document.doc
        if self._newest[document.kind].get(document.id) != document or isinstance(doc, TenantDoc):
            return False
        del self._newest[document.kind][document.id]
        if isinstance(doc, AdapterDoc):
            del self._adapters[doc.tenant][doc.name]
            nothing = AdapterDoc(tenant=doc.tenant, name=doc.name, created_at=doc.created_at, deleted_at=document.at)
            self._notify([replace(document, doc=nothing, deleted=True)])
        else:
            del self._keys[doc.tenant][document.id]
            self._notify([document])
        return True

    def _drop(self, tenant: str) -> None:
        for name in self._adapters.pop(tenant, {}):
            del self._newest[DocumentKind.ADAPTER][adapter_id(tenant, name)]
        for key_id in self._keys.pop(tenant, {}):
            del self._newest[DocumentKind.KEY][key_id]

    def _notify(self, documents: Iterable[AnyDocument]) -> None:
        for document in documents:
            for listener in self._listeners:
                listener(document)
