import contextlib
import errno
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from loraserve.store import documents, durable
from loraserve.store.documents import KEEP_REVISIONS, KEEP_S, MIN_REVISIONS, DocumentStore, ScanMark
from loraserve.store.errors import DamagedFileError, RevisionGapError, RevisionTakenError, UnreadFileError
from loraserve.store.locks import locked
from loraserve.store.records import AdapterDoc, DocumentKind
from tests.support.store_documents import adapter_document, key_document, revisions, tenant_document

ADAPTER = DocumentKind.ADAPTER
T = TypeVar("T")


class Damages(list[DamagedFileError]):
    """Collects the damage that a store reports."""


@pytest.fixture
def damages() -> Damages:
    return Damages()


@pytest.fixture
def store(tmp_path: Path, damages: Damages) -> DocumentStore:
    return DocumentStore(tmp_path / "data", on_damage=damages.append)


def revision_files(data_dir: Path) -> list[Path]:
    return sorted((data_dir / "docs").glob("*/*/*/*"))


def commit_revisions(store: DocumentStore, name: str, count: int) -> None:
    for rev in range(1, count + 1):
        store.commit(adapter_document(name, rev, description=f"revision {rev}"))


def settle(tmp_path: Path) -> None:
    """Dates all folders back, as if all commits so far were long ago."""
    docs = tmp_path / "data" / "docs"
    for folder in (*docs.glob("*/*"), *docs.glob("*/*/*")):
        if folder.is_dir():
            os.utime(folder, (1e9, 1e9))


def test_a_document_that_was_never_committed_is_none(store: DocumentStore) -> None:
    assert store.get(ADAPTER, "acme/nothing") is None
    assert store.revision(ADAPTER, "acme/nothing", 1) is None
    assert list(store.scan(ADAPTER)) == []


def test_a_commit_that_fails_on_a_full_disk_leaves_no_files(
    store: DocumentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(durable, "write_all", full)
    with pytest.raises(OSError, match="No space left"):
        store.commit(adapter_document("sql", 1))
    assert os.listdir(tmp_path / "data" / "docs" / "tmp") == []
    assert revision_files(tmp_path / "data") == []


@pytest.mark.parametrize(
    "document", [adapter_document("sql", 1), tenant_document("acme"), key_document("abcdefgh")], ids=lambda d: d.kind
)
def test_a_committed_document_is_read_back_by_every_store(store: DocumentStore, tmp_path: Path, document) -> None:
    store.commit(document)
    assert store.get(document.kind, document.id) == document
    assert DocumentStore(tmp_path / "data").get(document.kind, document.id) == document
    assert list(store.scan(document.kind)) == [document]


def test_get_returns_the_newest_revision_and_history_lists_all(store: DocumentStore) -> None:
    commit_revisions(store, "sql", 12)
    newest = store.get(ADAPTER, "acme/sql")
    assert newest is not None
    assert newest.rev == 12
    assert [document.rev for document in revisions(store, "acme/sql", 13)] == list(range(12, 0, -1))


def test_a_taken_revision_is_refused_and_not_changed(store: DocumentStore) -> None:
    commit_revisions(store, "sql", 3)
    for rev in (1, 2, 3):
        with pytest.raises(RevisionTakenError) as caught:
            store.commit(adapter_document("sql", rev, description="too late"))
        assert caught.value.rev == rev
    kept = [adapter_document("sql", rev, description=f"revision {rev}") for rev in (3, 2, 1)]
    assert revisions(store, "acme/sql", 4) == kept


def test_a_commit_that_loses_a_race_before_linking_leaves_no_file(
    store: DocumentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_synced = documents.write_synced

    def overtaken(path: Path, data: bytes) -> None:
        monkeypatch.setattr(documents, "write_synced", write_synced)
        DocumentStore(tmp_path / "data").commit(adapter_document("sql", 1, description="first"))
        write_synced(path, data)

    monkeypatch.setattr(documents, "write_synced", overtaken)
    with pytest.raises(RevisionTakenError):
        store.commit(adapter_document("sql", 1, description="second"))
    winner = store.get(ADAPTER, "acme/sql")
    assert winner is not None
    assert isinstance(winner.doc, AdapterDoc)
    assert winner.doc.description == "first"
    assert os.listdir(tmp_path / "data" / "docs" / "tmp") == []


@pytest.mark.parametrize("rev", [2, 7])
def test_a_revision_without_its_predecessor_is_refused(store: DocumentStore, rev: int) -> None:
    with pytest.raises(RevisionGapError, match=f"revision {rev} cannot follow revision 0"):
        store.commit(adapter_document("sql", rev))
    assert store.get(ADAPTER, "acme/sql") is None


def test_a_file_is_synced_before_it_is_linked_and_its_folder_afterwards(
    store: DocumentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, link = os.fsync, os.link

    def recorded_fsync(descriptor: int) -> None:
        events.append("sync folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "sync file")
        fsync(descriptor)

    def recorded_link(source: Path, target: Path) -> None:
        events.append("link")
        link(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "link", recorded_link)
    store.commit(adapter_document("sql", 1))
    assert events == ["sync folder", "sync folder", "sync file", "link", "sync folder"]
    events.clear()
    store.commit(adapter_document("sql", 2))
    assert events == ["sync file", "link", "sync folder"]


@pytest.mark.parametrize("hostile", ["../../etc/passwd", "a/../../b", "x" * 5000, "name\nwith\0bytes", "ü/é", ""])
def test_an_id_never_becomes_part_of_a_path(store: DocumentStore, tmp_path: Path, hostile: str) -> None:
    document = msgspec.structs.replace(adapter_document("sql", 1), id=hostile)
    store.commit(document)
    assert store.get(ADAPTER, hostile) == document
    (path,) = revision_files(tmp_path / "data")
    assert path.name == "00000001.json"
    assert len(path.parent.name) == 64
    assert path.parent.parent.name == path.parent.name[:2]


def test_everything_is_private_to_the_user(tmp_path: Path) -> None:
    old_umask = os.umask(0)
    try:
        (tmp_path / "open").mkdir(mode=0o755)
        (tmp_path / "open" / "docs").mkdir(mode=0o755)
        for data_dir in (tmp_path / "new", tmp_path / "open"):
            DocumentStore(data_dir).commit(adapter_document("sql", 1))
            for path in (data_dir / "docs", *(data_dir / "docs").rglob("*")):
                assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
        assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    finally:
        os.umask(old_umask)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"kind":"adapter"}', b"null"])
def test_a_damaged_newest_revision_is_reported_and_no_older_one_is_returned(
    store: DocumentStore, tmp_path: Path, damages: Damages, content: bytes
) -> None:
    commit_revisions(store, "sql", 2)
    commit_revisions(store, "chat", 1)
    newest = next(path for path in revision_files(tmp_path / "data") if path.name == "00000002.json")
    newest.write_bytes(content)
    with pytest.raises(DamagedFileError) as caught:
        store.get(ADAPTER, "acme/sql")
    assert caught.value.path == newest
    assert [document.id for document in store.scan(ADAPTER)] == ["acme/chat"]
    assert [damage.path for damage in damages] == [newest]
    assert [document.rev for document in revisions(store, "acme/sql", 2)] == [1]
    assert [damage.path for damage in damages] == [newest] * 2


def test_a_damaged_document_is_repaired_by_its_next_revision(store: DocumentStore, tmp_path: Path) -> None:
    commit_revisions(store, "sql", 1)
    revision_files(tmp_path / "data")[0].write_bytes(b"torn")
    store.commit(adapter_document("sql", 2))
    assert [document.rev for document in store.scan(ADAPTER)] == [2]


def test_a_revision_in_another_revisions_file_is_not_returned(
    store: DocumentStore, tmp_path: Path, damages: Damages
) -> None:
    commit_revisions(store, "sql", 1)
    (own,) = revision_files(tmp_path / "data")
    commit_revisions(store, "chat", 1)
    (other,) = set(revision_files(tmp_path / "data")) - {own}
    own.write_bytes(other.read_bytes())
    assert [document.id for document in store.scan(ADAPTER)] == ["acme/chat"]
    assert "does not belong in this file" in damages[0].reason
    own.rename(own.with_name("00000002.json"))
    assert [document.id for document in store.scan(ADAPTER)] == ["acme/chat"]


def test_a_document_of_another_kind_is_not_returned(store: DocumentStore, tmp_path: Path, damages: Damages) -> None:
    store.commit(tenant_document("acme"))
    (path,) = revision_files(tmp_path / "data")
    path.write_bytes(path.read_bytes().replace(b'"tenant"', b'"key"'))
    assert list(store.scan(DocumentKind.TENANT)) == []
    assert "a document of kind key, expected tenant" in damages[0].reason


def test_unexpected_files_are_reported_and_otherwise_ignored(
    store: DocumentStore, tmp_path: Path, damages: Damages
) -> None:
    commit_revisions(store, "sql", 2)
    folder = revision_files(tmp_path / "data")[0].parent
    foreign = [
        folder / "99999999.json~",
        folder / "3.json",
        folder.parent / "notes.txt",
        folder.parents[1] / "notes.txt",
    ]
    for path in foreign:
        path.write_bytes(b"{}")
    (folder.parents[1] / "zz").symlink_to(folder.parent)
    assert [document.rev for document in store.scan(ADAPTER)] == [2]
    assert {damage.path for damage in damages} == {*foreign, folder.parents[1] / "zz"}
    store.commit(adapter_document("sql", 3))


def test_hidden_files_of_macos_are_ignored(store: DocumentStore, tmp_path: Path, damages: Damages) -> None:
    commit_revisions(store, "sql", 2)
    folder = revision_files(tmp_path / "data")[0].parent
    keys = tmp_path / "data" / "docs" / "key"
    (keys / "ab").mkdir()
    for place in (folder, folder.parent, folder.parents[1], keys, keys / "ab"):
        (place / ".DS_Store").write_bytes(b"")
        (place / "._sql").write_bytes(b"")
        (place / ".Trashes").mkdir()
    (keys / ".Trashes" / "file").write_bytes(b"")
    assert [document.rev for document in store.scan(ADAPTER)] == [2]
    assert [document.rev for document in store.scan_changed(ADAPTER)[0]] == [2]
    assert not store.has_any(DocumentKind.KEY)
    assert damages == []
    store.prune()


def test_a_symbolic_link_is_never_followed(store: DocumentStore, tmp_path: Path, damages: Damages) -> None:
    commit_revisions(store, "sql", 1)
    (path,) = revision_files(tmp_path / "data")
    path.rename(tmp_path / "elsewhere.json")
    path.symlink_to(tmp_path / "elsewhere.json")
    assert list(store.scan(ADAPTER)) == []
    assert [damage.path for damage in damages] == [path]


def test_scan_changed_reads_only_changed_documents(store: DocumentStore, tmp_path: Path) -> None:
    for name in ("sql", "chat", "code"):
        commit_revisions(store, name, 1)
    settle(tmp_path)
    everything, mark = store.scan_changed(ADAPTER)
    assert len(everything) == 3
    assert store.scan_changed(ADAPTER, mark)[0] == []
    store.commit(adapter_document("chat", 2))
    store.commit(adapter_document("new", 1))
    changed, mark = store.scan_changed(ADAPTER, mark)
    assert {(document.id, document.rev) for document in changed} == {("acme/chat", 2), ("acme/new", 1)}
    settle(tmp_path)
    _, mark = store.scan_changed(ADAPTER, mark)
    assert store.scan_changed(ADAPTER, mark)[0] == []


def test_a_quick_scan_looks_only_into_folders_with_commits(
    store: DocumentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"skill-{number}" for number in range(20)]
    for name in names:
        commit_revisions(store, name, 1)
    settle(tmp_path)
    _, mark = store.scan_changed(ADAPTER)
    listed: list[str] = []
    sub_folders = documents._sub_folders
    monkeypatch.setattr(documents, "_sub_folders", lambda *args: listed.append(args[0]) or sub_folders(*args))

    def quick(mark: ScanMark) -> tuple[set[tuple[str, int]], ScanMark]:
        listed.clear()
        changed, mark = store.scan_changed(ADAPTER, mark, is_quick=True)
        return {(document.id, document.rev) for document in changed}, mark

    found, mark = quick(mark)
    assert (found, len(listed)) == (set(), 1)
    store.commit(adapter_document("skill-3", 2))
    store.commit(adapter_document("new", 1))
    found, mark = quick(mark)
    assert found == {("acme/skill-3", 2), ("acme/new", 1)}
    assert len(listed) <= 3
    assert quick(mark)[0] == found  # Not settled yet.
    settle(tmp_path)
    _, mark = quick(mark)
    assert quick(mark)[0] == set()
    assert store.retired_among(ADAPTER, [(f"acme/{name}", 1) for name in names], mark) == []
    assert store.scan_changed(ADAPTER, mark)[0] == []


@pytest.mark.parametrize("fate", ["goes on", "is killed", "goes on after its announcement was pruned"])
def test_a_quick_scan_misses_no_commit_that_was_running_during_the_one_before(
    store: DocumentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fate: str
) -> None:
    """However long the commit was stalled just before its revision got its name."""
    commit_revisions(store, "sql", 1)
    settle(tmp_path)
    mark = store.scan_changed(ADAPTER)[1]
    link, unlink = os.link, Path.unlink

    def announced() -> list[Path]:
        return [*(tmp_path / "data" / "docs" / "adapter").glob("*/.committing-*")]

    def scan_and_link(source: Path, target: Path) -> None:
        nonlocal mark
        if "pruned" in fate:
            unlink(announced()[0])
        settle(tmp_path)
        changed, mark = store.scan_changed(ADAPTER, mark)
        assert changed == []
        link(source, target)
        if fate == "is killed":
            monkeypatch.setattr(Path, "unlink", lambda *_args, **_how: None)

    monkeypatch.setattr(os, "link", scan_and_link)
    store.commit(adapter_document("sql", 2))
    monkeypatch.setattr(Path, "unlink", unlink)
    changed, mark = store.scan_changed(ADAPTER, mark, is_quick=True)
    assert [document.rev for document in changed] == [2]
    if fate == "is killed":
        store.prune()
        assert len(announced()) == 1
        store.prune(time.time() + 7200)
    assert announced() == []


def test_a_quick_scan_retries_files_that_could_not_be_read(
    store: DocumentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_revisions(store, "sql", 1)
    settle(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(documents, "_content", denied)
        changed, mark = store.scan_changed(ADAPTER)
    assert changed == []
    changed, mark = store.scan_changed(ADAPTER, mark, is_quick=True)
    assert [document.rev for document in changed] == [1]
    assert store.scan_changed(ADAPTER, mark, is_quick=True)[0] == []


def denied(path: str) -> bytes:
    raise PermissionError(errno.EACCES, "Permission denied", path)


def test_scan_changed_misses_no_commit_within_one_tick_of_the_clock(store: DocumentStore, tmp_path: Path) -> None:
    commit_revisions(store, "sql", 1)
    folder = revision_files(tmp_path / "data")[0].parent
    now_ns = time.time_ns()
    os.utime(folder, ns=(now_ns, now_ns))
    _, mark = store.scan_changed(ADAPTER)
    store.commit(adapter_document("sql", 2))
    os.utime(folder, ns=(now_ns, now_ns))
    changed, _ = store.scan_changed(ADAPTER, mark)
    assert [document.rev for document in changed] == [2]


def test_scan_changed_retries_files_that_could_not_be_read(
    store: DocumentStore, tmp_path: Path, damages: Damages, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_revisions(store, "sql", 1)
    settle(tmp_path)

    def fail(path: str) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files", path)

    with monkeypatch.context() as patched:
        patched.setattr(documents, "_content", fail)
        changed, mark = store.scan_changed(ADAPTER)
    assert changed == []
    assert [type(damage) for damage in damages] == [UnreadFileError]
    changed, mark = store.scan_changed(ADAPTER, mark)
    assert [document.rev for document in changed] == [1]
    assert store.scan_changed(ADAPTER, mark)[0] == []


@contextlib.contextmanager
def of_another_user(*folders: Path) -> Iterator[None]:
    """Makes listing these folders fail; permissions would not, since root can list everything."""

    def refusing(system_call: Callable[[str], T]) -> Callable[[str], T]:
        def listed(path: str) -> T:
            if Path(path) in folders:
                raise PermissionError(errno.EACCES, "Permission denied", path)
            return system_call(path)

        return listed

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "scandir", refusing(os.scandir))
        patched.setattr(os, "listdir", refusing(os.listdir))
        yield


@pytest.mark.parametrize("depth", [0, 1, 2], ids=["kind", "prefix", "document"])
def test_a_folder_that_could_not_be_listed_is_read_by_a_later_scan(
    store: DocumentStore, tmp_path: Path, damages: Damages, depth: int
) -> None:
    commit_revisions(store, "sql", 2)
    store.commit(adapter_document("other", 1))
    settle(tmp_path)
    (file,) = (file for file in revision_files(tmp_path / "data") if file.name == "00000002.json")
    folder = file.parents[2 - depth]
    with of_another_user(folder):
        assert "acme/sql" not in [document.id for document in store.scan(ADAPTER)]
        damages.clear()
        changed, mark = store.scan_changed(ADAPTER)
        assert [document.id for document in changed] == ([] if depth == 0 else ["acme/other"])
        assert [(type(damage), damage.path) for damage in damages] == [(UnreadFileError, folder)]
        assert store.has_any(ADAPTER)
        assert store.prune() == 0
        changed, mark = store.scan_changed(ADAPTER, mark)
        assert changed == []
        assert not mark.is_complete
    changed, mark = store.scan_changed(ADAPTER, mark)
    assert mark.is_complete
    assert ("acme/sql", 2) in [(document.id, document.rev) for document in changed]
    assert store.scan_changed(ADAPTER, mark)[0] == []


def test_a_document_whose_folder_cannot_be_listed_is_not_reported_as_missing(
    store: DocumentStore, tmp_path: Path
) -> None:
    commit_revisions(store, "sql", 1)
    (file,) = revision_files(tmp_path / "data")
    with of_another_user(file.parent):
        with pytest.raises(UnreadFileError, match="make sure that the server's user can read it"):
            store.get(ADAPTER, "acme/sql")
        with pytest.raises(PermissionError):
            store.commit(adapter_document("sql", 1))


def test_documents_in_a_folder_that_can_be_listed_but_not_entered_are_reported_as_unread(
    store: DocumentStore, tmp_path: Path, damages: Damages, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Locked:
        def __init__(self, entry: "os.DirEntry[str]") -> None:
            self.name, self.path, self.is_dir = entry.name, entry.path, entry.is_dir

        def stat(self) -> os.stat_result:
            raise PermissionError(errno.EACCES, "Permission denied", self.path)

    commit_revisions(store, "sql", 1)
    settle(tmp_path)
    sub_folders = documents._sub_folders
    with monkeypatch.context() as patched:
        patched.setattr(documents, "_sub_folders", lambda *asked: map(Locked, sub_folders(*asked)))
        changed, mark = store.scan_changed(ADAPTER)
    assert changed == []
    assert not mark.is_complete
    assert [type(damage) for damage in damages] == [UnreadFileError]
    assert [document.id for document in store.scan_changed(ADAPTER, mark)[0]] == ["acme/sql"]


def test_scan_changed_reports_a_damaged_document_once(store: DocumentStore, tmp_path: Path, damages: Damages) -> None:
    commit_revisions(store, "sql", 1)
    revision_files(tmp_path / "data")[0].write_bytes(b"torn")
    settle(tmp_path)
    _, mark = store.scan_changed(ADAPTER)
    assert store.scan_changed(ADAPTER, mark)[0] == []
    assert len(damages) == 1


def test_has_any_counts_documents_whether_or_not_they_can_be_read(store: DocumentStore, tmp_path: Path) -> None:
    store.commit(adapter_document("sql", 1))
    folder = tmp_path / "data" / "docs" / "key"
    assert not store.has_any(DocumentKind.KEY)
    # As left by a writer that died before its commit.
    (folder / "ab" / ("ab" * 32)).mkdir(parents=True)
    assert not store.has_any(DocumentKind.KEY)
    (folder / "ab" / ("ab" * 32) / "00000003.json").touch()
    assert store.has_any(DocumentKind.KEY)


def test_has_any_counts_a_symbolic_link_in_place_of_a_folder_as_a_document(
    store: DocumentStore, tmp_path: Path
) -> None:
    (tmp_path / "moved").mkdir()
    (tmp_path / "data" / "docs" / "key" / "ab").symlink_to(tmp_path / "moved")
    assert store.has_any(DocumentKind.KEY)
    assert not store.has_any(ADAPTER)


def test_scan_changed_notices_a_restored_backup_with_old_times(store: DocumentStore, tmp_path: Path) -> None:
    commit_revisions(store, "sql", 2)
    settle(tmp_path)
    _, mark = store.scan_changed(ADAPTER)
    newest = revision_files(tmp_path / "data")[-1]
    newest.unlink()
    os.utime(newest.parent, (5e8, 5e8))
    assert [document.rev for document in store.scan_changed(ADAPTER, mark)[0]] == [1]


def test_a_commit_by_any_store_updates_last_commit_ns(store: DocumentStore, tmp_path: Path) -> None:
    os.utime(tmp_path / "data" / "docs" / "tmp", ns=(0, 0))
    assert store.last_commit_ns() == 0
    other = DocumentStore(tmp_path / "data")
    assert other.get(DocumentKind.KEY, "abcdefgh") is None
    assert store.last_commit_ns() == 0
    other.commit(key_document("abcdefgh", 1))
    assert store.last_commit_ns() > 0


def test_prune_keeps_the_last_50_and_the_last_30_days(store: DocumentStore, tmp_path: Path) -> None:
    commit_revisions(store, "sql", KEEP_REVISIONS + 10)
    now = time.time()
    for path in revision_files(tmp_path / "data"):
        age_s = KEEP_S + 60 if int(path.stem) <= 7 else KEEP_S - 60
        os.utime(path, (now - age_s, now - age_s))
    assert store.prune(now) == 7
    assert [document.rev for document in revisions(store, "acme/sql", 100)] == list(range(60, 7, -1))
    assert store.prune(now + 365 * 86_400) == 3
    assert len(revision_files(tmp_path / "data")) == KEEP_REVISIONS
    newest = store.get(ADAPTER, "acme/sql")
    assert newest is not None
    assert newest.rev == 60


def test_commits_keep_no_more_than_the_maximum_number_of_revisions(
    store: DocumentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MAX_REVISIONS", 5)
    commit_revisions(store, "sql", 8)
    store.commit(adapter_document("other", 1))
    assert [document.rev for document in revisions(store, "acme/sql", 100)] == [8, 7, 6, 5, 4]
    with pytest.raises(RevisionTakenError):
        store.commit(adapter_document("sql", 1))


def test_fewer_large_revisions_are_kept_but_never_less_than_the_minimum(
    store: DocumentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MAX_REVISIONS_BYTES", 30_000)
    for rev in range(1, 31):
        store.commit(adapter_document("large", rev, description="x" * 1500))
        store.commit(adapter_document("huge", rev, description="x" * 5000))
    assert [document.rev for document in revisions(store, "acme/large", 100)] == list(range(30, 14, -1))
    assert [document.rev for document in revisions(store, "acme/huge", 100)] == list(range(30, 20, -1))
    store.commit(adapter_document("huge", 31))
    assert len(revisions(store, "acme/huge", 100)) == MIN_REVISIONS + 1


def test_a_pruned_revision_is_still_taken(store: DocumentStore) -> None:
    commit_revisions(store, "sql", KEEP_REVISIONS + 1)
    assert store.prune(time.time() + 365 * 86_400) == 1
    with pytest.raises(RevisionTakenError):
        store.commit(adapter_document("sql", 1))


def test_prune_removes_temporary_files_of_killed_writers(store: DocumentStore, tmp_path: Path) -> None:
    left = tmp_path / "data" / "docs" / "tmp" / "0123"
    left.write_bytes(b"{")
    store.prune()
    assert left.exists()
    store.prune(time.time() + 7200)
    assert not left.exists()


def test_a_document_is_removed_with_all_its_revisions(store: DocumentStore, tmp_path: Path, damages: Damages) -> None:
    commit_revisions(store, "sql", 3)
    store.commit(adapter_document("kept", 1))
    _, mark = store.scan_changed(ADAPTER)
    store.remove(ADAPTER, "acme/sql")
    store.remove(ADAPTER, "acme/sql")
    assert store.get(ADAPTER, "acme/sql") is None
    assert [document.id for document in store.scan(ADAPTER)] == ["acme/kept"]
    assert [document.id for document in store.scan_changed(ADAPTER, mark)[0]] in ([], ["acme/kept"])
    assert not [path for path in (tmp_path / "data" / "docs").rglob("*") if b"sql" in _bytes(path)]
    assert damages == []


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def test_prune_finishes_a_removal_that_was_interrupted(
    store: DocumentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.commit(adapter_document("sql", 1))
    with monkeypatch.context() as patched:
        patched.setattr(durable, "remove_folder", lambda path: None)
        store.remove(ADAPTER, "acme/sql")
    assert store.get(ADAPTER, "acme/sql") is None
    assert len([*(tmp_path / "data" / "docs" / "trash").iterdir()]) == 1
    store.prune()
    assert [*(tmp_path / "data" / "docs" / "trash").iterdir()] == []


def test_a_document_removed_during_a_read_is_missing_and_not_damaged(
    store: DocumentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damages: Damages
) -> None:
    store.commit(adapter_document("sql", 1))
    other = DocumentStore(tmp_path / "data")
    names = documents._names

    def listed_just_before(folder: str) -> list[str]:
        found = names(folder)
        other.remove(ADAPTER, "acme/sql")
        return found

    monkeypatch.setattr(documents, "_names", listed_just_before)
    assert store.get(ADAPTER, "acme/sql") is None
    monkeypatch.undo()
    store.commit(adapter_document("sql", 1))
    monkeypatch.setattr(documents, "_names", listed_just_before)
    assert [*store.scan(ADAPTER)] == []
    assert damages == []


def test_an_input_output_error_is_not_taken_for_a_removal(
    store: DocumentStore, monkeypatch: pytest.MonkeyPatch, damages: Damages
) -> None:
    store.commit(adapter_document("sql", 1))

    def stuck(*_: object, **__: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", stuck)
        patched.setattr(os, "stat", stuck)
        with pytest.raises(UnreadFileError):
            store.get(ADAPTER, "acme/sql")
        assert [*store.scan(ADAPTER)] == []
    assert len(damages) == 1


def test_forget_older_removes_all_revisions_except_the_newest(store: DocumentStore) -> None:
    commit_revisions(store, "sql", 4)
    store.forget_older(ADAPTER, "acme/sql")
    store.forget_older(ADAPTER, "acme/nothing")
    assert [document.rev for document in revisions(store, "acme/sql", 10)] == [4]
    with pytest.raises(RevisionTakenError):
        store.commit(adapter_document("sql", 1))
    store.commit(adapter_document("sql", 5))


def test_damage_is_logged_by_default(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = DocumentStore(tmp_path / "data")
    store.commit(adapter_document("sql", 1))
    (path,) = revision_files(tmp_path / "data")
    path.write_bytes(b"torn")
    assert list(store.scan(ADAPTER)) == []
    assert str(path) in caplog.text


def test_retired_documents_are_removed_and_new_ones_start_at_later_revisions(
    store: DocumentStore, tmp_path: Path, damages: Damages
) -> None:
    commit_revisions(store, "sql", 3)
    commit_revisions(store, "short", 1)
    store.commit(adapter_document("kept", 1))
    gone = [document for name in ("sql", "short") if (document := store.get(ADAPTER, f"acme/{name}")) is not None]
    assert store.retire(gone) == gone
    assert [path.parent.name for path in revision_files(tmp_path / "data")] == [folder_of("kept")]
    assert list((tmp_path / "data" / "docs" / "trash").iterdir()) == []
    assert store.get(ADAPTER, "acme/sql") is store.revision(ADAPTER, "acme/sql", 3) is None
    assert store.retire(gone) == []
    other = DocumentStore(tmp_path / "data")
    for rev in (1, 3):
        with pytest.raises(RevisionTakenError):
            other.commit(adapter_document("sql", rev))
    with pytest.raises(RevisionGapError):
        other.commit(adapter_document("sql", 5))
    for name in ("sql", "short", "new"):
        assert other.first_rev(ADAPTER) == 4
        other.commit(adapter_document(name, 4))
    assert other.first_rev(DocumentKind.KEY) == 1
    store.commit(adapter_document("kept", 2))
    assert store.retire([adapter_document("kept", 2)]) != []
    assert store.first_rev(ADAPTER) == 5, "it grows each time, by which an older copy is known"
    assert damages == []


def test_nothing_is_retired_from_an_older_copy_of_the_directory(store: DocumentStore) -> None:
    commit_revisions(store, "sql", 2)
    doomed = [adapter_document("sql", 2, "revision 2")]
    assert store.retire(doomed, removed_rev=1) == []
    assert store.first_rev(ADAPTER) == 1
    assert store.get(ADAPTER, "acme/sql") == doomed[0]
    assert store.retire(doomed, removed_rev=0) == doomed
    store.commit(adapter_document("sql", 3))
    assert store.retire([adapter_document("sql", 3)], removed_rev=2) != []


def test_nothing_is_retired_while_another_process_holds_the_commit_lock(
    store: DocumentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "QUIET_WITHIN_S", 0.01)
    commit_revisions(store, "sql", 1)
    doomed = [adapter_document("sql", 1, "revision 1")]
    with locked(tmp_path / "data" / "docs" / "lock", shared=True):
        assert store.retire(doomed) == []
        store.commit(adapter_document("other", 1))
    assert store.retire(doomed) == doomed


def test_the_folder_of_a_retired_document_is_gone_durably_before_its_revisions_are_deleted(
    store: DocumentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_revisions(store, "sql", 2)
    (folder,) = (tmp_path / "data" / "docs" / "adapter").glob("*/*")
    synced: list[Path] = []
    removed: list[list[Path]] = []
    monkeypatch.setattr(documents, "sync_folder", synced.append)
    monkeypatch.setattr(documents, "remove_folder", lambda _: removed.append([*synced]))
    store.retire([adapter_document("sql", 2, "revision 2")])
    assert not folder.exists()
    assert removed == [[folder.parent]]


def folder_of(name: str) -> str:
    return hashlib.sha256(f"acme/{name}".encode()).hexdigest()


def test_documents_that_differ_from_the_disk_are_not_retired(store: DocumentStore, tmp_path: Path) -> None:
    commit_revisions(store, "changed", 2)
    commit_revisions(store, "damaged", 1)
    store.commit(adapter_document("other", 1, "not this"))
    judged = [adapter_document("changed", 1, "revision 1"), adapter_document("damaged", 1, "revision 1")]
    (path,) = (tmp_path / "data" / "docs" / "adapter").glob(f"*/{folder_of('damaged')}/*")
    path.write_bytes(b"{")
    assert store.retire([*judged, adapter_document("other", 1, "this"), adapter_document("missing", 1)]) == []
    assert len(revision_files(tmp_path / "data")) == 4


def test_a_document_above_the_maximum_retired_revision_is_not_retired(
    store: DocumentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MAX_RETIRED_REV", 2)
    commit_revisions(store, "sql", 3)
    newest = store.get(ADAPTER, "acme/sql")
    assert newest is not None
    assert store.retire([newest]) == []
    assert store.first_rev(ADAPTER) == 1


def test_retired_among_distinguishes_retired_documents_from_ones_lost_otherwise(
    store: DocumentStore, tmp_path: Path
) -> None:
    for name in ("retired", "again", "vanished"):
        commit_revisions(store, name, 1)
    commit_revisions(store, "kept", 1)
    revs = [(f"acme/{name}", 1) for name in ("retired", "again", "kept")]
    assert store.retired_among(ADAPTER, revs) == []
    shutil.rmtree(next((tmp_path / "data" / "docs" / "adapter").glob(f"*/{folder_of('vanished')}")))
    assert store.retired_among(ADAPTER, [("acme/vanished", 1)]) == []
    assert len(store.retire([adapter_document(name, 1, "revision 1") for name in ("retired", "again")])) == 2
    store.commit(adapter_document("again", 2))
    assert store.retired_among(ADAPTER, revs) == ["acme/retired"]
    assert store.retired_among(ADAPTER, [("acme/retired", 2)]) == []
    settle(tmp_path)
    _, mark = store.scan_changed(ADAPTER)
    assert store.retired_among(ADAPTER, revs, mark) == ["acme/retired"]


def test_a_damaged_removed_revision_file_is_reported_and_blocks_commits_of_its_kind(
    store: DocumentStore, tmp_path: Path
) -> None:
    (tmp_path / "data" / "docs" / "removed" / "adapter").write_bytes(b"many")
    with pytest.raises(DamagedFileError, match="removed/adapter: is not a revision number"):
        store.commit(adapter_document("sql", 1))
    store.commit(key_document("abcdefgh"))


def test_a_read_during_retirement_and_reuse_of_the_name_returns_the_new_document(
    store: DocumentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_revisions(store, "sql", 1)
    other, read = DocumentStore(tmp_path / "data"), documents._content
    others = iter([lambda: other.retire([adapter_document("sql", 1, "revision 1")])])

    def read_late(path: str) -> bytes:
        for retire in others:
            retire()
            other.commit(adapter_document("sql", 2))
        return read(path)

    monkeypatch.setattr(documents, "_content", read_late)
    assert store.get(ADAPTER, "acme/sql") == adapter_document("sql", 2)
