"""Opening files of an adapter folder that may have been made to hurt us."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from loraserve_adapters.errors import AdapterError
from loraserve_adapters.limits import Limits


@contextmanager
def open_regular(folder: Path, name: str, limits: Limits) -> Iterator[tuple[int, int]]:
    """Yields (file descriptor, size in bytes) of a regular file in `folder`, closed on exit.

    Never blocks on a FIFO or device, and follows no symbolic link but as `limits` say.
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
    """Opens the file at the link's end by going down to it from a root; where the link led is only how it is found.

    Where else a link leads, and whether there is something, is not told.
    """
    path = Path(os.path.realpath(folder / name))
    for root in roots:
        if Path(root) in path.parents:
            with suppress(OSError):
                return open_below(root, path.relative_to(root).parts, os.O_NONBLOCK)
    reason = "is a symbolic link that leads to no readable file below a folder that adapters may be loaded from"
    raise AdapterError("not_a_regular_file", f"{name} {reason}", file=name)


def open_below(root: str, parts: tuple[str, ...], flags: int) -> int:
    """Opens, to be read, what is there; no parts = the root itself. Raises OSError, also where there is a link.

    NOTE: each part is opened within the one before and is no link, so nobody who can write below the root leads out of
    it, whatever they exchange meanwhile.
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
    """Fills `target` from `offset` of the file; a file that became shorter meanwhile is refused."""
    position = 0
    while position < len(target):
        count = os.preadv(descriptor, [target[position:]], offset + position)
        if count == 0:
            raise AdapterError("file_changed", f"{name} became shorter while it was read", file=name)
        position += count
