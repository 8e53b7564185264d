"""Removes content that no document refers to, as found by reading all documents, never by counting references."""

import re
from collections.abc import Iterable
from pathlib import Path

from loraserve_adapters.base_layout import BaseLayout
from loraserve_adapters.packed_file import packed_file_name

from loraserve.control.documents.adapter_edits import wants
from loraserve.store.blobs import SWEEP_AFTER_S, BlobStore
from loraserve.store.documents import DocumentStore
from loraserve.store.errors import DamagedFileError
from loraserve.store.records import AdapterDoc, Document, DocumentKind, is_a

UNREAD_AFTER_S = 7 * 86_400
"""A packed file for another base model or release that was not read for this long is no longer in use."""
_PACKED = re.compile(r"([0-9a-f]{64})-.*")


def reachable(documents: Iterable[Document[AdapterDoc]], now: float) -> set[str]:
    """Digests that must stay on disk: of adapters that exist, or are deleted and still restorable."""
    return {digest for document in documents for digest in wants(document.doc, now=now, restorable=True)}


def sweep_contents(data_dir: Path, packed_dir: Path, layout: BaseLayout, now: float) -> list[str]:
    """Removes unreachable blobs and packed files older than an hour; returns the blobs' digests. Synchronous.

    Packed files of reachable content that are not for `layout` are removed once unread for a week; they can be made
    again.

    Reads the documents from disk, because memory may lag behind another server. Raises `DamagedFileError`, with nothing
    removed: a document that cannot be read may refer to anything.
    """
    documents = DocumentStore(data_dir, on_damage=_raise)
    live = reachable((found for found in documents.scan(DocumentKind.ADAPTER) if is_a(found, AdapterDoc)), now)
    removed = BlobStore(data_dir).sweep(live, now=now)
    _sweep_packed(packed_dir, live, layout, now)
    return removed


def _sweep_packed(packed_dir: Path, live: set[str], layout: BaseLayout, now: float) -> None:
    if not packed_dir.is_dir():
        return
    for path in packed_dir.iterdir():
        match = _PACKED.fullmatch(path.name)
        if match and _is_stale(path, match[1], live, layout, now):
            path.unlink(missing_ok=True)


def _is_stale(path: Path, digest: str, live: set[str], layout: BaseLayout, now: float) -> bool:
    try:
        found = path.stat()
    except FileNotFoundError:  # another server swept it
        return False
    if digest not in live:
        return found.st_mtime < now - SWEEP_AFTER_S
    is_ours = path.name == packed_file_name(digest, layout)
    return not is_ours and max(found.st_atime, found.st_mtime) < now - UNREAD_AFTER_S


def _raise(damage: DamagedFileError) -> None:
    raise damage
