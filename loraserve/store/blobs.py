"""The content of adapters, named by its digest: independent of tenants and adapter names, and never changed.

`blobs/<hh>/<digest>/{adapter_config.json, adapter_model.safetensors, manifest.json}`. A folder is fsynced with all its
files and then appears by a single rename, so every folder here is complete.
"""

import os
import shutil
import stat
import time
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path

import msgspec
from loraserve_adapters.sync_file import sync_file, sync_folder

from loraserve.store.durable import data_folder, discard_folder, empty_trash, make_folder
from loraserve.store.errors import IncompleteBlobError, InvalidNameError
from loraserve.store.locks import locked
from loraserve.store.names import DIGEST

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MANIFEST_FILE = "manifest.json"
BLOB_FILES = frozenset({CONFIG_FILE, WEIGHTS_FILE, MANIFEST_FILE})

SWEEP_AFTER_S = 3600.0
SWEEP_EVERY_S = 600.0
SWEPT_WITHIN_S = SWEEP_AFTER_S + SWEEP_EVERY_S
"""Content that no document refers to is removed within this time after its publication."""


class BlobStore:
    """Synchronous; safe to use from several threads and processes at once."""

    def __init__(self, data_dir: Path) -> None:
        self._folder = data_folder(data_dir, "blobs")
        self._trash = data_folder(self._folder, "trash")
        self._lock = self._folder / "lock"

    def folder(self, digest: str) -> Path | None:
        """The content's folder; None if the content is not here."""
        path = self._path(digest)
        return path if path.is_dir() else None

    def publish(self, prepared: Path, digest: str) -> None:
        """Moves a folder with exactly `BLOB_FILES`, on the same file system, to its place.

        When this returns, the content survives a crash and is safe from `sweep` for an hour; a document must name it by
        then. If the content already exists, for example as an orphan of a crash, its config and weights are replaced by
        those in `prepared`, which have equal bytes unless the existing ones were damaged; its manifest only if that is
        damaged. `prepared` is removed. Raises `IncompleteBlobError`. After an `OSError` the upload has failed: data may
        be lost, so do not call again.
        """
        _sync_content(prepared)
        target = self._path(digest)
        with locked(self._lock, shared=True):
            make_folder(target.parent)
            is_moved = not target.is_dir() and _try_rename(prepared, target)
            if not is_moved:
                _renew(prepared, target)
            os.utime(target)
            sync_folder(target)
            sync_folder(target.parent)
        if not is_moved:
            shutil.rmtree(prepared)

    def sweep(self, live: AbstractSet[str], older_than_s: float = SWEEP_AFTER_S, now: float | None = None) -> list[str]:
        """Removes content that is not live and was published more than `older_than_s` ago; returns the digests.

        live: every digest that a document names, including those of versions and adapters that can still be restored.
        """
        now = time.time() if now is None else now
        empty_trash(self._trash)
        with locked(self._lock):
            doomed = [
                digest
                for digest in self.digests()
                if digest not in live and self._path(digest).stat().st_mtime < now - older_than_s
            ]
            for digest in doomed:
                discard_folder(self._path(digest), self._trash)
        return doomed

    def digests(self) -> Iterator[str]:
        """Digests of all content here, live or not, in no particular order."""
        with os.scandir(self._folder) as prefixes:
            for prefix in prefixes:
                if len(prefix.name) == 2:
                    yield from filter(DIGEST.fullmatch, os.listdir(prefix.path))

    def _path(self, digest: str) -> Path:
        if not DIGEST.fullmatch(digest):
            raise InvalidNameError("a digest is 64 lowercase hexadecimal characters")
        return self._folder / digest[:2] / digest


def _sync_content(prepared: Path) -> None:
    found = set(os.listdir(prepared))
    if found != BLOB_FILES:
        raise IncompleteBlobError(f"{prepared} holds {sorted(found)}, expected {sorted(BLOB_FILES)}")
    for name in BLOB_FILES:
        descriptor = os.open(prepared / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise IncompleteBlobError(f"{prepared / name} is not a regular file")
            sync_file(descriptor)
        finally:
            os.close(descriptor)
    sync_folder(prepared)


def _try_rename(source: Path, target: Path) -> bool:
    """False if another process was first: a folder cannot be renamed onto one that is not empty."""
    try:
        source.rename(target)
    except OSError:
        if target.is_dir():
            return False
        raise
    return True


def _renew(prepared: Path, target: Path) -> None:
    """Replaces each file atomically. An intact manifest stays: it may be for another base model."""
    for name in BLOB_FILES:
        if name != MANIFEST_FILE or not _is_json(target / name):
            os.replace(prepared / name, target / name)


def _is_json(path: Path) -> bool:
    try:
        msgspec.json.decode(path.read_bytes())
    except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True
