"""Whether a file is still the one that was read, without reading it."""

from dataclasses import dataclass
from pathlib import Path

SETTLED_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class FileState:
    """As the file system tells: another one once the file was replaced or written to."""

    device_number: int
    inode_number: int
    size_bytes: int
    modified_ns: int
    changed_ns: int
    """Unlike the time of modification, nobody can set it."""

    def was_settled(self, now_ns: int) -> bool:
        """now_ns: since the epoch, from before the state was asked for. Whether any write since then changes it.

        A write within one tick of the clock after another leaves the state as it is.
        """
        return now_ns - max(self.modified_ns, self.changed_ns) > SETTLED_NS


def file_state(path: Path) -> FileState | None:
    """Links are followed. None where there is no such file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return FileState(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
