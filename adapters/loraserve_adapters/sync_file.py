"""Syncing a file or a folder so that it survives a power cut, on macOS too."""

import errno
import fcntl
import os
from pathlib import Path

_F_FULLFSYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)
"""macOS alone has it."""


def sync_file(descriptor: int, *, data_only: bool = False) -> None:
    """What was written to it survives a power cut. data_only: its time stamps may not.

    `fsync` of macOS leaves it in the drive's cache, which is emptied here where the file system can.
    """
    if _F_FULLFSYNC is not None:
        try:
            fcntl.fcntl(descriptor, _F_FULLFSYNC)
            return
        except OSError as error:
            if error.errno == errno.EIO:
                raise  # another sync might succeed although the bytes are lost
    if data_only and hasattr(os, "fdatasync"):
        os.fdatasync(descriptor)
    else:
        os.fsync(descriptor)


def sync_folder(path: Path) -> None:
    """Creations, renames and removals in it so far survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync_file(descriptor)
    finally:
        os.close(descriptor)
