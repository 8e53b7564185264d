"""Documents to commit, and a process that commits them.

`python -m tests.support.store_documents JOB DATA_DIR ARGUMENT`, where JOB and ARGUMENT are:

race COUNT: waits for a line, then tries to commit the next revision of one document until it has COUNT; prints the
revisions it won.
write NAME: commits new documents and revisions until it is stopped; prints `<id> <rev>` after each.
reuse COUNT: like `race`, but alternately creates and deletes the document until there were COUNT revisions; prints
those it committed.
retire COUNT: waits for a line, then removes that document whenever it is deleted, until there were COUNT revisions;
prints the revisions it removed.
"""

import itertools
import random
import sys
import time
from pathlib import Path

from loraserve.store.documents import DocumentStore
from loraserve.store.errors import RevisionTakenError
from loraserve.store.records import AdapterDoc, AnyDocument, Document, DocumentKind, KeyDoc, Role, TenantDoc


def revisions(store: DocumentStore, document_id: str, newest: int) -> list[AnyDocument]:
    """An adapter's existing revisions, newest first."""
    found = (store.revision(DocumentKind.ADAPTER, document_id, rev) for rev in range(newest, 0, -1))
    return [document for document in found if document is not None]


def adapter_document(name: str, rev: int, description: str = "", *, deleted: bool = False) -> Document[AdapterDoc]:
    doc = AdapterDoc(tenant="acme", name=name, description=description, created_at=1.0)
    return Document(
        kind=DocumentKind.ADAPTER,
        id=f"acme/{name}",
        rev=rev,
        at=2.0,
        actor="open",
        action="adapter.delete" if deleted else "adapter.put",
        request_id=f"r{rev}",
        deleted=deleted,
        doc=doc,
    )


def tenant_document(name: str, rev: int = 1) -> Document[TenantDoc]:
    doc = TenantDoc(kv_salt="salt")
    return Document(
        kind=DocumentKind.TENANT, id=name, rev=rev, at=2.0, actor="cli", action="tenant.put", request_id="r", doc=doc
    )


def key_document(key_id: str, rev: int = 1) -> Document[KeyDoc]:
    doc = KeyDoc(tenant="acme", role=Role.INFER, sha256="ab" * 32, created_at=1.0)
    return Document(
        kind=DocumentKind.KEY, id=key_id, rev=rev, at=2.0, actor="cli", action="key.create", request_id="r", doc=doc
    )


def race(store: DocumentStore, count: int) -> None:
    """Done when there are `count` revisions, whichever process won them."""
    print("ready", flush=True)
    sys.stdin.readline()
    while True:
        newest = store.get(DocumentKind.ADAPTER, "acme/raced")
        rev = newest.rev + 1 if newest is not None else 1
        if rev > count:
            return
        try:
            store.commit(adapter_document("raced", rev))
        except RevisionTakenError:
            continue
        print(rev)


def reuse(store: DocumentStore, count: int) -> None:
    """Done when there were `count` revisions, whichever process committed them."""
    print("ready", flush=True)
    sys.stdin.readline()
    while True:
        newest = store.get(DocumentKind.ADAPTER, "acme/raced")
        rev = newest.rev + 1 if newest is not None else store.first_rev(DocumentKind.ADAPTER)
        if rev > count:
            return
        deleted = newest is not None and not newest.deleted
        try:
            store.commit(adapter_document("raced", rev, deleted=deleted))
        except RevisionTakenError:
            continue
        print(rev)
        if deleted:
            # Gives `retire` a window, which is often too short.
            time.sleep(random.random() * 0.04)


def retire(store: DocumentStore, count: int) -> None:
    print("ready", flush=True)
    sys.stdin.readline()
    while store.first_rev(DocumentKind.ADAPTER) <= count:
        newest = store.get(DocumentKind.ADAPTER, "acme/raced")
        if newest is not None and newest.rev >= count:
            return
        if newest is not None and newest.deleted and store.retire([newest]):
            print(newest.rev)


def write(store: DocumentStore, name: str) -> None:
    for number in itertools.count():
        for rev in (1, 2, 3):
            document = adapter_document(f"{name}-{number}", rev, description="x" * 5000)
            store.commit(document)
            print(document.id, rev, flush=True)


def main() -> None:
    job, data_dir, argument = sys.argv[1:]
    store = DocumentStore(Path(data_dir))
    if job == "write":
        write(store, argument)
    else:
        {"race": race, "reuse": reuse, "retire": retire}[job](store, int(argument))


if __name__ == "__main__":
    main()
