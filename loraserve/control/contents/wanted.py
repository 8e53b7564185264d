"""Which contents the documents refer to, updated with every change."""

import time
from collections import Counter
from collections.abc import Callable

from loraserve.control.documents.adapter_edits import wants
from loraserve.control.documents.catalog import Catalog
from loraserve.store.records import AdapterDoc, AnyDocument, Document, is_a


class WantedContents:
    """Called on the event loop. A document that is deleted, or whose tenant is, wants nothing, even if restorable."""

    def __init__(
        self, catalog: Catalog, on_dropped: Callable[[str], None], *, clock: Callable[[], float] = time.time
    ) -> None:
        """on_dropped: called with each digest that a document stops referring to; others may still refer to it."""
        self._catalog = catalog
        self._on_dropped = on_dropped
        self._clock = clock
        self._wanted_by: dict[str, set[str]] = {}
        """Digests by document id."""
        self._num_wanting: Counter[str] = Counter()
        for document in catalog.all_adapters():
            self._take_in(document)
        catalog.subscribe(self._on_change)

    def __contains__(self, digest: str) -> bool:
        return self._num_wanting[digest] > 0

    def _on_change(self, document: AnyDocument) -> None:
        if is_a(document, AdapterDoc):
            for digest in self._take_in(document):
                self._on_dropped(digest)

    def _take_in(self, document: Document[AdapterDoc]) -> set[str]:
        """Returns what this document wanted and no longer wants."""
        is_gone = self._catalog.is_deleted(document.doc.tenant)
        new = set[str]() if is_gone else wants(document.doc, now=self._clock(), restorable=False)
        old = self._wanted_by.get(document.id, set())
        self._num_wanting.update(new - old)
        self._num_wanting.subtract(old - new)
        for digest in old - new:
            if self._num_wanting[digest] == 0:
                del self._num_wanting[digest]
        if new:
            self._wanted_by[document.id] = new
        else:
            self._wanted_by.pop(document.id, None)
        return old - new
