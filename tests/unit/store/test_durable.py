import errno
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from loraserve_adapters import sync_file as sync_module
from loraserve_adapters.sync_file import sync_file

from loraserve.store.durable import (
    data_folder,
    discard_folder,
    empty_trash,
    remove_old_folders,
    replace_file,
)
from loraserve.store.locks import locked, try_locked


def test_a_file_is_replaced_atomically(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_file(path, b"old")
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failed_replacement_leaves_the_old_content_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "file"
    replace_file(path, b"old")

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match="Input/output error"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the sync calls made."""
    calls: list[str] = []
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda _, name=name: calls.append(name))
    return calls


def full_sync(calls: list[str], error: int | None = None) -> Callable[[int, int], None]:
    """Stands in for macOS's `fcntl` with `F_FULLFSYNC`."""

    def fcntl_of_macos(descriptor: int, command: int) -> None:
        calls.append("full")
        assert command == 51
        if error is not None:
            raise OSError(error, os.strerror(error))

    return fcntl_of_macos


def test_fdatasync_is_used_for_data_only_if_the_system_has_it(
    monkeypatch: pytest.MonkeyPatch, synced: list[str]
) -> None:
    sync_file(0)
    sync_file(0, data_only=True)
    monkeypatch.delattr(os, "fdatasync")
    sync_file(0, data_only=True)
    assert synced == ["fsync", "fdatasync", "fsync"]


@pytest.mark.parametrize(("error", "calls"), [(None, ["full"]), (errno.ENOTSUP, ["full", "fsync"])])
def test_on_macos_the_drives_cache_is_flushed_if_supported(
    monkeypatch: pytest.MonkeyPatch, synced: list[str], error: int | None, calls: list[str]
) -> None:
    monkeypatch.setattr(sync_module, "_F_FULLFSYNC", 51)
    monkeypatch.delattr(os, "fdatasync")
    monkeypatch.setattr(fcntl, "fcntl", full_sync(synced, error))
    sync_file(0, data_only=True)
    assert synced == calls


def test_on_macos_an_input_output_error_of_a_full_sync_is_not_retried_with_fsync(
    monkeypatch: pytest.MonkeyPatch, synced: list[str]
) -> None:
    monkeypatch.setattr(sync_module, "_F_FULLFSYNC", 51)
    monkeypatch.setattr(fcntl, "fcntl", full_sync(synced, errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        sync_file(0)
    assert synced == ["full"]


def test_folders_of_the_data_directory_are_private_to_the_user(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir(mode=0o755)
    for data_dir in (tmp_path, tmp_path / "deep" / "new"):
        folder = data_folder(data_dir, "docs")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_discard_folder_removes_the_folder_and_empty_trash_removes_leftovers(tmp_path: Path) -> None:
    trash = data_folder(tmp_path, "trash")
    doomed = data_folder(tmp_path, "doomed")
    (doomed / "file").write_bytes(b"1")
    discard_folder(doomed, trash)
    assert os.listdir(tmp_path) == ["trash"]
    (trash / ".discarded-0").mkdir()
    (trash / ".discarded-0" / "file").write_bytes(b"1")
    empty_trash(trash)
    assert os.listdir(trash) == []


def test_a_folder_that_another_process_removes_concurrently_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trash, doomed = data_folder(tmp_path, "trash"), data_folder(tmp_path, "doomed")
    for name in ("one", "two"):
        (doomed / name).write_bytes(b"1")
    unlink = os.unlink

    def overtaken(path: str, *, dir_fd: int | None = None) -> None:
        unlink(path, dir_fd=dir_fd)
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", overtaken)
    discard_folder(doomed, trash)
    assert os.listdir(trash) == []


def test_a_folder_that_cannot_be_removed_raises_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trash, doomed = data_folder(tmp_path, "trash"), data_folder(tmp_path, "doomed")
    (doomed / "file").write_bytes(b"1")

    def fail(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "unlink", fail)
    with pytest.raises(PermissionError):
        discard_folder(doomed, trash)


def test_only_old_folders_that_match_the_pattern_are_removed(tmp_path: Path) -> None:
    for name in (".old-1", ".young-1", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"1")
    (tmp_path / ".file-1").write_bytes(b"1")
    for name in (".old-1", "old", ".file-1"):
        os.utime(tmp_path / name, (0, 0))
    remove_old_folders(tmp_path, ".*-*", 3600)
    assert sorted(os.listdir(tmp_path)) == [".file-1", ".young-1", "old"]
    remove_old_folders(tmp_path / "absent", "*", 0)


def test_shared_locks_coexist_and_exclude_an_exclusive_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path, shared=True), locked(path, shared=True), try_locked(path) as is_ours:
        assert not is_ours
    with try_locked(path) as is_ours:
        assert is_ours
