"""Engine ids that outlive their processes, so that charts continue after a restart.

An id is `engines/engine-<n>.lock` below the data directory. A process takes the first that is not locked; its lock is
released when it dies.
"""

import os
from pathlib import Path

from loraserve.store.durable import data_folder
from loraserve.store.locks import try_lock

SUFFIX = ".lock"


class EngineSlot:
    """Held until `release` or the end of the process."""

    def __init__(self, data_dir: Path) -> None:
        folder = data_folder(data_dir, "engines")
        number = 0
        while (descriptor := try_lock(folder / f"engine-{number}{SUFFIX}")) is None:
            number += 1
        self.engine = f"engine-{number}"
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def engine_ids(data_dir: Path) -> list[str]:
    """Ids of all engines that ever existed, sorted by name."""
    return sorted(path.name.removesuffix(SUFFIX) for path in data_folder(data_dir, "engines").glob(f"engine-*{SUFFIX}"))
