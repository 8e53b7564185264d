"""Opens files of an adapter folder that may be malicious."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from loraserve_adapters.errors import AdapterError
from loraserve_adapters.limits import AdapterLimits


@contextmanager
def open_regular(folder: Path, name: str, limits: AdapterLimits) -> Iterator[tuple[int, int]]:
    """Yields (file descriptor, size in bytes) of a regular file in `folder`, closed on exit.

    Never blocks on a FIFO or device, and follows symbolic links only as `limits` allow.
    """
    descriptor = _open(folder, name, limits)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise AdapterError("not_a_regular_file", f"{name} is not a regular file", file=name)
        yield descriptor, status.st_size
    finally:
        os.close(descriptor)


def _open(folder: Path, name: str, limits: AdapterLimits) -> int:
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    if not limits.follow_symlinks:
        flags |= os.O_NOFOLLOW
    try:
        if not limits.follow_symlinks and limits.link_roots and (folder / name).is_symlink():
            return _open_linked(folder, name, limits.link_roots)
        return os.open(folder / name, flags)
    except (FileNotFoundError, NotADirectoryError):
        raise AdapterError("missing_file", f"{name} is missing from the adapter folder", file=name) from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise AdapterError("not_a_regular_file", f"{name} is a symbolic link", file=name) from None
        reason = os.strerror(error.errno) if error.errno else "unknown reason"
        raise AdapterError("unreadable_file", f"{name} cannot be opened: {reason}", file=name) from None


def _open_linked(folder: Path, name: str, roots: tuple[str, ...]) -> int:
    """Opens the link's target by descending to it from a root; following the link only tells which path to open.

    The error does not reveal where a link leads outside of the roots, nor whether anything is there.
    """
    path = Path(os.path.realpath(folder / name))
    for root in roots:
        if Path(root) in path.parents:
            with suppress(OSError):
                return open_below(root, path.relative_to(root).parts, os.O_NONBLOCK)
    reason = "is a symbolic link that does not lead to a readable file below a folder that adapters may be loaded from"
    raise AdapterError("not_a_regular_file", f"{name} {reason}", file=name)


def open_below(root: str, parts: tuple[str, ...], flags: int) -> int:
    """Opens a path below the root for reading; no parts = the root itself. Raises OSError, also if a part is a link.

    NOTE: each part is opened within the one before and is not a link. So whoever can write below the root cannot lead
    out of it, whatever they replace during the call.
    """
    no_link = os.O_NOFOLLOW | os.O_CLOEXEC
    enter = no_link | os.O_DIRECTORY | getattr(os, "O_PATH", os.O_RDONLY)
    parent = os.open(root, enter)
    try:
        for part in parts[:-1]:
            child = os.open(part, enter, dir_fd=parent)
            os.close(parent)
            parent = child
        return os.open(parts[-1] if parts else ".", no_link | os.O_RDONLY | flags, dir_fd=parent)
    finally:
        os.close(parent)


def read_exactly(descriptor: int, target: memoryview, offset: int, name: str) -> None:
    """Fills `target` from `offset` of the file; a file that became too short is refused."""
    position = 0
    while position < len(target):
        count = os.preadv(descriptor, [target[position:]], offset + position)
        if count == 0:
            raise AdapterError("file_changed", f"{name} became shorter while it was read", file=name)
        position += count
