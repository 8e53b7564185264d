"""Ids of engines that outlive their processes, so that charts go on after a restart.

`engines/engine-<n>.lock` below the data directory; the first that nobody holds is taken. A process that dies lets go.
"""

import fcntl
import os
from pathlib import Path

from loraserve.store.durable import data_folder

SUFFIX = ".lock"


class EngineSlot:
    """Held until `release`, or the end of the process."""

    def __init__(self, data_dir: Path) -> None:
        folder = data_folder(data_dir, "engines")
        number = 0
        while (descriptor := _try_lock(folder / f"engine-{number}{SUFFIX}")) is None:
            number += 1
        self.engine = f"engine-{number}"
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def engine_ids(data_dir: Path) -> list[str]:
    """Of every engine that ever was, by name."""
    return sorted(path.name.removesuffix(SUFFIX) for path in data_folder(data_dir, "engines").glob(f"engine-*{SUFFIX}"))


def _try_lock(path: Path) -> int | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
