"""The bytes of one upload, as they arrive."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from loraserve_adapters.sync_file import sync_file, sync_folder

from loraserve.store.durable import Bytes
from loraserve.store.errors import UploadFileError
from loraserve.store.upload_session import UPLOAD_FILES


class UploadParts:
    """`<file>.part` for each of `UPLOAD_FILES`, and `prepared/`. The caller holds the upload's lock."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._prepared = folder / "prepared"

    def path(self, file_name: str) -> Path:
        """Raises `UploadFileError`."""
        if file_name not in UPLOAD_FILES:
            raise UploadFileError(f"{file_name[:80]!a} is not one of {', '.join(UPLOAD_FILES)}")
        return self._folder / f"{file_name}.part"

    def size_bytes(self, file_name: str) -> int:
        try:
            return self.path(file_name).stat().st_size
        except FileNotFoundError:
            return 0

    def append(self, file_name: str, offset: int, data: Bytes) -> None:
        """Writes and syncs all of the data, or nothing. `offset` is the part's size.

        After an error the part is truncated: a later sync could succeed although the bytes of the failed one are lost.
        """
        part = self.path(file_name)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            _write_at(descriptor, offset, data)
            sync_file(descriptor, data_only=True)
        except BaseException:
            os.ftruncate(descriptor, offset)
            raise
        finally:
            os.close(descriptor)
        if offset == 0:
            sync_folder(self._folder)

    def link_all(self) -> Path:
        """Recreates the folder `prepared` with every file under its own name; returns its path."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self._prepared)
        self._prepared.mkdir(mode=0o700)
        for name in UPLOAD_FILES:
            part = self.path(name)
            part.touch(mode=0o600)
            os.link(part, self._prepared / name)
        return self._prepared

    def remove(self) -> None:
        for name in UPLOAD_FILES:
            self.path(name).unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            shutil.rmtree(self._prepared)


def _write_at(descriptor: int, offset: int, data: Bytes) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[written:], offset + written
