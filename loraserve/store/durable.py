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
    """The store's own sub-folder `name`, mode 0700 whatever the umask and however the data directory was made."""
    if not data_dir.is_dir():
        data_dir.parent.mkdir(parents=True, exist_ok=True)
        make_folder(data_dir)
    folder = data_dir / name
    make_folder(folder)
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:
        folder.chmod(0o700)
    return folder


def make_folder(path: Path) -> None:
    """The folder exists, mode 0700, and will after a crash; its parent must exist."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    sync_folder(path.parent)


def write_synced(path: Path, data: bytes) -> None:
    """A new file, mode 0600, whose content survives a crash; its name only after `sync_folder`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        write_all(descriptor, data)
        sync_file(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: Bytes) -> None:
    """At the file's position. Raises `OSError`, possibly after a part."""
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
    """With all in it, also while another process removes the same."""
    while path.exists():
        # Up to Python 3.12, `rmtree` stops at the first file that somebody else has removed.
        with suppress(FileNotFoundError):
            shutil.rmtree(path)


def discard_folder(path: Path, trash: Path) -> None:
    """Gone from its name at once and as a whole, its bytes right after. `trash`: a folder of the same file system.

    Raises `FileNotFoundError` where another process was faster.
    """
    remove_folder(set_aside(path, trash))


def set_aside(path: Path, trash: Path) -> Path:
    """As `discard_folder`, but for its bytes: returns where they are."""
    doomed = trash / f"{_DISCARDED}{secrets.token_hex(8)}"
    path.rename(doomed)
    return doomed


def empty_trash(trash: Path) -> None:
    """Finishes what `discard_folder` was killed in."""
    for doomed in trash.glob(f"{_DISCARDED}*"):
        shutil.rmtree(doomed, ignore_errors=True)


def remove_old_folders(parent: Path, pattern: str, older_than_s: float) -> None:
    """Those in which nothing was made or removed for so long: what processes that were killed left behind."""
    before = time.time() - older_than_s
    for folder in parent.glob(pattern):
        with suppress(FileNotFoundError):
            if folder.is_dir() and folder.stat().st_mtime < before:
                shutil.rmtree(folder, ignore_errors=True)
