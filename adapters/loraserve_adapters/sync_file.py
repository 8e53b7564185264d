"""Syncing a file or a folder so that it survives a power cut, on macOS too."""

import errno
import fcntl
import os
from pathlib import Path

_F_FULLFSYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)
"""Only macOS has it."""


def sync_file(descriptor: int, *, data_only: bool = False) -> None:
    """Data written so far survives a power cut. data_only: time stamps may not.

    On macOS, `fsync` leaves data in the drive's cache; this flushes that too if the file system can.
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
