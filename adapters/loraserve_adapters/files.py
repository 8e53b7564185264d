"""Opening files of an adapter folder that may have been made to hurt us."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loraserve_adapters.errors import AdapterError
from loraserve_adapters.limits import Limits


@contextmanager
def open_regular(folder: Path, name: str, limits: Limits) -> Iterator[tuple[int, int]]:
    """Yields (file descriptor, size in bytes) of a regular file in `folder`, closed on exit.

    Never blocks on a FIFO or device and follows no symbolic link unless `limits.follow_symlinks`.
    """
    descriptor = _open(folder, name, limits)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise AdapterError("not_a_regular_file", f"{name} is not a regular file", file=name)
        yield descriptor, status.st_size
    finally:
        os.close(descriptor)


def _open(folder: Path, name: str, limits: Limits) -> int:
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    if not limits.follow_symlinks:
        flags |= os.O_NOFOLLOW
    try:
        return os.open(folder / name, flags)
    except (FileNotFoundError, NotADirectoryError):
        raise AdapterError("missing_file", f"{name} is missing from the adapter folder", file=name) from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise AdapterError("not_a_regular_file", f"{name} is a symbolic link", file=name) from None
        reason = os.strerror(error.errno) if error.errno else "unknown reason"
        raise AdapterError("unreadable_file", f"{name} cannot be opened: {reason}", file=name) from None


def read_exactly(descriptor: int, target: memoryview, offset: int, name: str) -> None:
    """Fills `target` from `offset` of the file; a file that became shorter meanwhile is refused."""
    position = 0
    while position < len(target):
        count = os.preadv(descriptor, [target[position:]], offset + position)
        if count == 0:
            raise AdapterError("file_changed", f"{name} became shorter while it was read", file=name)
        position += count
