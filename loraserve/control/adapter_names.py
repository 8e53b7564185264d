"""The adapters there are, as metrics name them."""

from loraserve.control.catalog import Catalog
from loraserve.serving.bound_adapter import NamedContent
from loraserve.store.records import DEFAULT_TENANT, LIVE_ALIAS, SHARED_TENANT, AdapterDoc, VersionRecord


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


def live_version(adapter: AdapterDoc) -> VersionRecord | None:
    """What the bare name means, canaries aside."""
    alias = adapter.aliases.get(LIVE_ALIAS)
    if alias is None:
        return None
    return next((version for version in adapter.versions if version.n == alias.version), None)


def label_of(tenant: str, name: str) -> str:
    """Unique; names of the tenants that every server has stay bare."""
    return name if tenant in (DEFAULT_TENANT, SHARED_TENANT) else f"{tenant}/{name}"
