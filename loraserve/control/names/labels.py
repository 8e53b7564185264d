"""Names of the existing adapters in metrics."""

from loraserve.control.documents.adapter_edits import live_version
from loraserve.control.documents.catalog import Catalog
from loraserve.serving.bound_adapter import NamedContent
from loraserve.store.records import DEFAULT_TENANT, SHARED_TENANT


class CatalogNames:
    """The `AdapterNames` of all tenants' adapters."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def contents(self) -> list[NamedContent]:
        found: list[NamedContent] = []
        for document in self._catalog.all_adapters():
            adapter = document.doc
            live = live_version(adapter)
            if live is not None and adapter.enabled and adapter.deleted_at is None:
                found.append(NamedContent(label_of(adapter.tenant, adapter.name), live.digest, live.size_bytes))
        return found


def label_of(tenant: str, name: str) -> str:
    """Built-in tenants' adapters keep bare names, so one of `default` and a shared one of its name have one label."""
    return name if tenant in (DEFAULT_TENANT, SHARED_TENANT) else f"{tenant}/{name}"
