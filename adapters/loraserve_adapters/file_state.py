"""Detects, without reading a file, whether it is still the one that was read."""

from dataclasses import dataclass
from pathlib import Path

SETTLED_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class FileState:
    """What the file system reports about a file; differs once the file was replaced or written to."""

    device_number: int
    inode_number: int
    size_bytes: int
    modified_ns: int
    changed_ns: int
    """Unlike the modification time, it cannot be set."""

    def was_settled(self, now_ns: int) -> bool:
        """Whether any write after `now_ns` changes the state: a second write within one clock tick would not.

        now_ns: since the epoch, taken before the state was read.
        """
        return now_ns - max(self.modified_ns, self.changed_ns) > SETTLED_NS


def file_state(path: Path) -> FileState | None:
    """Follows links. None if there is no such file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return FileState(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
