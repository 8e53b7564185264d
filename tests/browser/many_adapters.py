"""A tenant with more adapters than any page may hold, written directly to disk."""

import time
from pathlib import Path
from typing import TypeVar
from unittest import mock

from loraserve.store.documents import DocumentStore
from loraserve.store.records import AdapterDoc, Alias, Document, DocumentKind, TenantDoc, VersionRecord

D = TypeVar("D", TenantDoc, AdapterDoc)

MANY_TENANT = "many"
NUM_MANY = 10_000


def many_name(index: int) -> str:
    return f"adapter-{index:05d}"


def write_many_adapters(data_dir: Path, count: int) -> None:
    """Adapters that are ready according to their documents, but whose content does not exist."""
    now = time.time()
    store = DocumentStore(data_dir)
    # Avoids ten thousand waits for the disk, none of which a test needs.
    with mock.patch("os.fsync"):
        store.commit(_document(DocumentKind.TENANT, MANY_TENANT, now, TenantDoc(kv_salt="many")))
        for index in range(count):
            name = many_name(index)
            store.commit(_document(DocumentKind.ADAPTER, f"{MANY_TENANT}/{name}", now, _adapter(name, index, now)))


def _adapter(name: str, index: int, now: float) -> AdapterDoc:
    version = VersionRecord(
        n=1,
        digest=f"{index:064x}",
        upload_id=name,
        created_at=now,
        by="cli",
        size_bytes=10_000_000 + index,
        max_rank=8,
        targets=["q_proj", "v_proj"],
    )
    return AdapterDoc(
        tenant=MANY_TENANT,
        name=name,
        description=f"number {index}",
        created_at=now,
        versions=[version],
        aliases={"live": Alias(version=1, moved_at=now)},
    )


def _document(kind: DocumentKind, document_id: str, now: float, doc: D) -> Document[D]:
    return Document(
        kind=kind, id=document_id, rev=1, at=now, actor="cli", action=f"{kind}.put", request_id="many", doc=doc
    )
