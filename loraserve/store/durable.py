"""Files and folders that survive a crash: complete or absent, and private to this user."""

import os
import secrets
import shutil
import stat
import time
from contextlib import suppress
from pathlib import Path

from loraserve_adapters.sync_file import sync_file, sync_folder

Bytes = bytes | bytearray | memoryview

_DISCARDED = ".discarded-"


def data_folder(data_dir: Path, name: str) -> Path:
    """The store's own subfolder `name`, with mode 0700 regardless of the umask and of how `data_dir` was created."""
    if not data_dir.is_dir():
        data_dir.parent.mkdir(parents=True, exist_ok=True)
        make_folder(data_dir)
    folder = data_dir / name
    make_folder(folder)
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:
        folder.chmod(0o700)
    return folder


def make_folder(path: Path) -> None:
    """Durably creates the folder with mode 0700 unless it exists; its parent must exist."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    sync_folder(path.parent)


def write_synced(path: Path, data: bytes) -> None:
    """Creates a file with mode 0600. Its content survives a crash; its name only after `sync_folder`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        write_all(descriptor, data)
        sync_file(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: Bytes) -> None:
    """Writes at the file's position. Raises `OSError`, possibly after writing a part."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def replace_file(path: Path, data: bytes) -> None:
    """Readers see the old content or the new one; when this returns, the new one survives a crash."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        write_synced(temporary, data)
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def remove_folder(path: Path) -> None:
    """Removes a folder and its contents, even while another process is removing it."""
    while path.exists():
        # Up to Python 3.12, `rmtree` stops at the first file that another process has removed.
        with suppress(FileNotFoundError):
            shutil.rmtree(path)


def discard_folder(path: Path, trash: Path) -> None:
    """Removes the folder's name atomically, then its contents. `trash`: a folder on the same file system.

    Raises `FileNotFoundError` if another process was faster.
    """
    remove_folder(set_aside(path, trash))


def set_aside(path: Path, trash: Path) -> Path:
    """Like `discard_folder`, but keeps the contents; returns their new place."""
    doomed = trash / f"{_DISCARDED}{secrets.token_hex(8)}"
    path.rename(doomed)
    return doomed


def empty_trash(trash: Path) -> None:
    """Finishes calls of `discard_folder` that were interrupted when a process was killed."""
    for doomed in trash.glob(f"{_DISCARDED}*"):
        shutil.rmtree(doomed, ignore_errors=True)


def remove_old_folders(parent: Path, pattern: str, older_than_s: float) -> None:
    """Removes folders left by killed processes: those in which no entry was created or removed for `older_than_s`."""
    before = time.time() - older_than_s
    for folder in parent.glob(pattern):
        with suppress(FileNotFoundError):
            if folder.is_dir() and folder.stat().st_mtime < before:
                shutil.rmtree(folder, ignore_errors=True)
