import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from loraserve.store.documents import DocumentStore, ScanMark
from loraserve.store.errors import RevisionGapError, RevisionTakenError
from loraserve.store.records import AnyDocument, DocumentKind
from tests.support.store_documents import adapter_document, revisions

ADAPTER = DocumentKind.ADAPTER
NAMES = st.sampled_from(["sql", "chat", "code"])


class Documents(RuleBasedStateMachine):
    """The stores of two processes on one folder, compared with a list of revisions for each name."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.stores = [DocumentStore(Path(self.folder.name) / "data") for _ in range(2)]
        self.revisions: dict[str, list[AnyDocument]] = {}
        self.removed_rev = 0
        self.mark: ScanMark | None = None
        self.followed: dict[str, AnyDocument] = {}

    def newest_rev(self, name: str) -> int:
        """The revision that the next commit follows."""
        known = self.revisions.get(f"acme/{name}")
        return known[-1].rev if known else self.removed_rev

    def commit(self, which: int, document: AnyDocument) -> None:
        self.stores[which].commit(document)
        self.revisions.setdefault(document.id, []).append(document)

    @rule(which=st.integers(0, 1), name=NAMES, text=st.text(max_size=20))
    def create_or_update(self, which: int, name: str, text: str) -> None:
        rev = self.newest_rev(name) + 1
        self.commit(which, adapter_document(name, rev, description=text))

    @rule(which=st.integers(0, 1), name=NAMES)
    def delete_or_restore(self, which: int, name: str) -> None:
        known = self.revisions.get(f"acme/{name}")
        if known:
            deleted = not known[-1].deleted
            self.commit(which, adapter_document(name, known[-1].rev + 1, deleted=deleted))

    @rule(which=st.integers(0, 1), name=NAMES)
    def race(self, which: int, name: str) -> None:
        """Both stores commit the same revision: the second one gets an error, whichever it is."""
        rev = self.newest_rev(name) + 1
        self.commit(which, adapter_document(name, rev, description="first"))
        with pytest.raises(RevisionTakenError):
            self.stores[1 - which].commit(adapter_document(name, rev, description="second"))

    @rule(which=st.integers(0, 1), name=NAMES, distance=st.integers(-3, 3).filter(bool))
    def commit_a_wrong_revision(self, which: int, name: str, distance: int) -> None:
        known = self.newest_rev(name)
        rev = max(1, known + 1 + distance)
        if rev == known + 1:
            return
        with pytest.raises(RevisionTakenError if rev <= known else RevisionGapError):
            self.stores[which].commit(adapter_document(name, rev, description="wrong"))

    @rule(which=st.integers(0, 1), name=NAMES)
    def retire(self, which: int, name: str) -> None:
        """Only deleted documents. Their revisions are gone, and new documents start after the highest one retired."""
        known = self.revisions.get(f"acme/{name}")
        if known and known[-1].deleted:
            assert self.stores[which].retire(known[-1:]) == known[-1:]
            del self.revisions[f"acme/{name}"]
            self.followed.pop(f"acme/{name}", None)
            self.removed_rev = max(self.removed_rev + 1, known[-1].rev)

    @rule(which=st.integers(0, 1))
    def prune(self, which: int) -> None:
        assert self.stores[which].prune() == 0

    @rule()
    def time_passes(self) -> None:
        """All that was committed so far was committed long ago."""
        docs = Path(self.folder.name) / "data" / "docs" / "adapter"
        for folder in (*docs.glob("*"), *docs.glob("*/*")):
            settled_s = folder.stat().st_mtime - 100
            os.utime(folder, (settled_s, settled_s))

    @rule(is_quick=st.booleans())
    def follow(self, is_quick: bool) -> None:
        """A reader that only ever reads changed documents knows all of them."""
        changed, self.mark = self.stores[0].scan_changed(ADAPTER, self.mark, is_quick=is_quick)
        self.followed.update({document.id: document for document in changed})
        assert self.followed == {key: revisions[-1] for key, revisions in self.revisions.items()}

    @invariant()
    def every_store_serves_the_newest_revisions(self) -> None:
        newest = {key: revisions[-1] for key, revisions in self.revisions.items()}
        for store in self.stores:
            assert {document.id: document for document in store.scan(ADAPTER)} == newest
            for key, known in self.revisions.items():
                assert store.get(ADAPTER, key) == newest[key]
                assert revisions(store, key, known[-1].rev + 1) == known[::-1]

    def teardown(self) -> None:
        self.folder.cleanup()


TestDocuments = Documents.TestCase
TestDocuments.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
