import fcntl
import os
import stat
import time
from pathlib import Path

import pytest

from loraserve.store.blobs import BLOB_FILES, MANIFEST_FILE, BlobStore
from loraserve.store.errors import IncompleteBlobError, InvalidNameError
from tests.support.crash_points import crash_points

DIGEST = "ab" * 32
OTHER = "cd" * 32


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "data")


def prepared_folder(tmp_path: Path, content: str = "content") -> Path:
    folder = tmp_path / "prepared"
    folder.mkdir()
    for name in BLOB_FILES:
        (folder / name).write_text(f'"{name} {content}"')
    return folder


def content_of(folder: Path | None) -> dict[str, str]:
    assert folder is not None
    return {path.name: path.read_text() for path in folder.iterdir()}


def publish(blobs: BlobStore, tmp_path: Path, digest: str) -> None:
    blobs.publish(prepared_folder(tmp_path), digest)


def make_old(blobs: BlobStore, digest: str) -> None:
    folder = blobs.folder(digest)
    assert folder is not None
    os.utime(folder, (1e9, 1e9))


def test_published_content_is_found_by_every_store(blobs: BlobStore, tmp_path: Path) -> None:
    assert blobs.folder(DIGEST) is None
    publish(blobs, tmp_path, DIGEST)
    assert content_of(BlobStore(tmp_path / "data").folder(DIGEST)) == {name: f'"{name} content"' for name in BLOB_FILES}
    assert list(blobs.digests()) == [DIGEST]
    assert not (tmp_path / "prepared").exists()


def test_publishing_content_that_already_exists_keeps_the_existing_files(blobs: BlobStore, tmp_path: Path) -> None:
    publish(blobs, tmp_path, DIGEST)
    prepared = prepared_folder(tmp_path)
    (prepared / MANIFEST_FILE).write_text('"made for another base model"')
    blobs.publish(prepared, DIGEST)
    assert content_of(blobs.folder(DIGEST)) == {name: f'"{name} content"' for name in BLOB_FILES}
    assert not (tmp_path / "prepared").exists()


@pytest.mark.parametrize("name", sorted(BLOB_FILES))
def test_publishing_again_repairs_content_with_lost_or_damaged_files(
    blobs: BlobStore, tmp_path: Path, name: str
) -> None:
    publish(blobs, tmp_path, DIGEST)
    folder = blobs.folder(DIGEST)
    assert folder is not None
    for other in BLOB_FILES - {name}:
        (folder / other).write_text("damaged")
    (folder / name).unlink()
    publish(blobs, tmp_path, DIGEST)
    assert content_of(folder) == {name: f'"{name} content"' for name in BLOB_FILES}


def test_a_publisher_that_loses_a_race_adopts_the_winners_content(
    blobs: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def overtaken(source: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        target.mkdir()
        (target / "manifest.json").write_text('{"of": "the winner"}')
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", overtaken)
    publish(blobs, tmp_path, DIGEST)
    assert content_of(blobs.folder(DIGEST)) == {
        **{name: f'"{name} content"' for name in BLOB_FILES},
        "manifest.json": '{"of": "the winner"}',
    }


@pytest.mark.parametrize("change", ["missing", "extra", "folder", "link", "fifo"])
def test_anything_but_the_three_regular_files_is_refused(blobs: BlobStore, tmp_path: Path, change: str) -> None:
    folder = prepared_folder(tmp_path)
    weights = folder / "adapter_model.safetensors"
    if change == "extra":
        (folder / "README.md").write_text("")
    else:
        weights.unlink()
    if change == "folder":
        weights.mkdir()
    if change == "link":
        weights.symlink_to("/etc/passwd")
    if change == "fifo":
        os.mkfifo(weights)
    with pytest.raises((IncompleteBlobError, OSError)):
        blobs.publish(folder, DIGEST)
    assert blobs.folder(DIGEST) is None


def test_files_are_synced_before_the_rename_and_folders_after_it(
    blobs: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def recorded_fsync(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        events.append("folder" if is_folder else "file")
        fsync(descriptor)

    def recorded_rename(source: Path, target: Path) -> None:
        events.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    publish(blobs, tmp_path, DIGEST)
    assert events == ["file", "file", "file", "folder", "folder", "rename", "folder", "folder"]


def test_a_failed_sync_publishes_nothing(blobs: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="Input/output error"):
        publish(blobs, tmp_path, DIGEST)
    assert blobs.folder(DIGEST) is None


@pytest.mark.parametrize("digest", ["", "../../../etc", "AB" * 32, "ab" * 31 + "a", "ab" * 32 + "\n", "/" * 64])
def test_an_invalid_digest_never_becomes_a_path(blobs: BlobStore, digest: str) -> None:
    with pytest.raises(InvalidNameError):
        blobs.folder(digest)


def test_sweep_removes_only_old_and_unreferenced_content(blobs: BlobStore, tmp_path: Path) -> None:
    young = "ef" * 32
    for digest in (DIGEST, OTHER, young):
        publish(blobs, tmp_path, digest)
    make_old(blobs, DIGEST)
    make_old(blobs, OTHER)
    assert blobs.sweep({DIGEST}) == [OTHER]
    assert set(blobs.digests()) == {DIGEST, young}
    assert blobs.sweep(set(), older_than_s=60, now=time.time() + 61)
    assert list(blobs.digests()) == []
    assert os.listdir(tmp_path / "data" / "blobs" / "trash") == []


def test_publishing_and_sweeping_exclude_each_other(
    blobs: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free: dict[tuple[str, bool], bool] = {}

    def note(job: str) -> None:
        for shared in (True, False):
            with open(tmp_path / "data" / "blobs" / "lock") as lock:
                try:
                    fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                    free[job, shared] = True
                except BlockingIOError:
                    free[job, shared] = False

    rename = os.rename

    def noted_rename(source: Path, target: Path) -> None:
        note("sweep" if target.parent.name == "trash" else "publish")
        rename(source, target)

    monkeypatch.setattr(os, "rename", noted_rename)
    publish(blobs, tmp_path, DIGEST)
    make_old(blobs, DIGEST)
    assert blobs.sweep(set()) == [DIGEST]
    assert free == {
        ("publish", True): True,
        ("publish", False): False,
        ("sweep", True): False,
        ("sweep", False): False,
    }


def test_publishing_an_orphan_again_protects_it_from_the_sweep(blobs: BlobStore, tmp_path: Path) -> None:
    publish(blobs, tmp_path, DIGEST)
    make_old(blobs, DIGEST)
    publish(blobs, tmp_path, DIGEST)
    assert blobs.sweep(set()) == []


def test_a_crash_while_publishing_leaves_all_or_nothing_and_publishing_can_be_repeated(tmp_path: Path) -> None:
    names = iter(range(1000))
    folder = tmp_path

    def prepare() -> None:
        nonlocal folder
        folder = tmp_path / str(next(names))
        folder.mkdir()
        BlobStore(folder / "data")
        prepared_folder(folder)

    def work() -> None:
        BlobStore(folder / "data").publish(folder / "prepared", DIGEST)

    seen: list[bool] = []
    for _ in crash_points(prepare, work):
        blobs = BlobStore(folder / "data")
        found = blobs.folder(DIGEST)
        seen.append(found is not None)
        assert (folder / "prepared").exists() != seen[-1]
        if seen[-1]:
            prepared_folder(folder)
        blobs.publish(folder / "prepared", DIGEST)
        assert len(content_of(blobs.folder(DIGEST))) == 3
    assert set(seen) == {False, True}


def test_a_crash_while_sweeping_leaves_no_partly_removed_content(tmp_path: Path) -> None:
    names = iter(range(1000))
    folder = tmp_path

    def prepare() -> None:
        nonlocal folder
        folder = tmp_path / str(next(names))
        folder.mkdir()
        publish(BlobStore(folder / "data"), folder, DIGEST)

    def sweep() -> None:
        BlobStore(folder / "data").sweep(set(), now=time.time() + 7200)

    seen: list[bool] = []
    for _ in crash_points(prepare, sweep):
        found = BlobStore(folder / "data").folder(DIGEST)
        seen.append(found is not None)
        assert found is None or len(content_of(found)) == 3
        sweep()
        assert BlobStore(folder / "data").folder(DIGEST) is None
        assert os.listdir(folder / "data" / "blobs" / "trash") == []
    assert set(seen) == {False, True}
