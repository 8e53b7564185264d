"""Which adapters have a content: names for what an engine knows by digest."""

from dataclasses import dataclass

from loraserve.control.documents.catalog import Catalog
from loraserve.control.tenancy.principal import Principal
from loraserve.store.records import SHARED_TENANT, AdapterDoc, AnyDocument, Document, is_a


@dataclass(frozen=True, slots=True)
class ContentName:
    tenant: str
    """The adapter's owner."""
    adapter: str
    version: int
    is_deleted: bool


class ContentNames:
    """Called on the event loop."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._names: dict[str, set[ContentName]] = {}
        self._of_document: dict[str, set[tuple[str, ContentName]]] = {}
        for document in catalog.all_adapters():
            self._take_in(document)
        catalog.subscribe(self._on_change)

    def name(self, principal: Principal, digest: str, tenant: str | None = None) -> ContentName | None:
        """The adapter of `tenant` (default: the acting one) that has the content, else a shared one; None = unknown.

        With a key for all tenants (`*`), otherwise any adapter that has it.
        """
        tenant = principal.acting_tenant if tenant is None else tenant
        known = [name for name in self._names.get(digest, ()) if _may_see(principal, name)]
        if not known:
            return None
        order = {tenant: 0, SHARED_TENANT: 1}
        return min(known, key=lambda name: (name.is_deleted, order.get(name.tenant, 2), name.adapter, -name.version))

    def _on_change(self, document: AnyDocument) -> None:
        if is_a(document, AdapterDoc):
            self._take_in(document)

    def _take_in(self, document: Document[AdapterDoc]) -> None:
        doc = document.doc
        for digest, name in self._of_document.pop(document.id, ()):
            self._names[digest].discard(name)
            if not self._names[digest]:
                del self._names[digest]
        named = {
            (
                version.digest,
                ContentName(doc.tenant, doc.name, version.n, bool(doc.deleted_at or version.deleted_at)),
            )
            for version in doc.versions
        }
        if self._catalog.is_deleted(doc.tenant):
            named.clear()
        if named:
            self._of_document[document.id] = named
        for digest, name in named:
            self._names.setdefault(digest, set()).add(name)


def _may_see(principal: Principal, name: ContentName) -> bool:
    is_near = name.tenant in (principal.acting_tenant, SHARED_TENANT)
    return principal.is_any_tenant or (is_near and principal.may_use(name.adapter))
