"""Removes content that no document refers to. Found by going through all documents, never by counting."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import cast

from loraserve.control.documents.adapter_edits import wants
from loraserve.store.blobs import SWEEP_AFTER_S, BlobStore
from loraserve.store.documents import DocumentStore
from loraserve.store.errors import DamagedFileError
from loraserve.store.records import AdapterDoc, Document, DocumentKind

_PACKED = re.compile(r"([0-9a-f]{64})-.*")


def reachable(documents: Iterable[Document[AdapterDoc]], now: float) -> set[str]:
    """Digests that must stay on disk: of adapters that are there, or deleted and still restorable."""
    return {digest for document in documents for digest in wants(document.doc, now=now, restorable=True)}


def sweep_contents(data_dir: Path, packed_dir: Path, now: float) -> list[str]:
    """Removes unreachable blobs and packed files older than an hour; returns the blobs' digests. Synchronous.

    Reads the documents from disk, since memory may lag behind another server. Raises `DamagedFileError`, with nothing
    removed: a document that cannot be read may refer to anything.
    """
    documents = DocumentStore(data_dir, on_damage=_raise)
    live = reachable((cast(Document[AdapterDoc], found) for found in documents.scan(DocumentKind.ADAPTER)), now)
    removed = BlobStore(data_dir).sweep(live, now=now)
    _sweep_packed(packed_dir, live, now)
    return removed


def _sweep_packed(packed_dir: Path, live: set[str], now: float) -> None:
    if not packed_dir.is_dir():
        return
    for path in packed_dir.iterdir():
        match = _PACKED.fullmatch(path.name)
        if match and match[1] not in live and path.stat().st_mtime < now - SWEEP_AFTER_S:
            path.unlink(missing_ok=True)


def _raise(damage: DamagedFileError) -> None:
    raise damage
