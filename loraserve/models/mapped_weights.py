"""Gives back the memory of weights that are still mapped from their safetensors file, once they were copied."""

import ctypes
import os
import sys
from mmap import PAGESIZE
from pathlib import Path

from torch import Tensor

_MADV_DONTNEED = 4


class MappedWeights:
    """The process's mappings of *.safetensors files, as of construction; empty if there is no /proc."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        if sys.platform == "linux":
            self._ranges = [(start, end) for start, end, path in _mappings() if path.endswith(".safetensors")]

    def release_pages(self, weight: Tensor) -> None:
        """Drop the weight's pages from memory if they are mapped from a file; touching them would read them again."""
        if not weight.is_cpu:
            return
        start = -(-weight.data_ptr() // PAGESIZE) * PAGESIZE
        end = (weight.data_ptr() + weight.nbytes) // PAGESIZE * PAGESIZE
        if end > start and any(low <= start and end <= high for low, high in self._ranges):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


def _mappings() -> list[tuple[int, int, str]]:
    found = []
    try:
        maps = os.fsdecode(Path("/proc/self/maps").read_bytes())
    except OSError:
        return []
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6:
            start, _, end = fields[0].partition("-")
            found.append((int(start, 16), int(end, 16), fields[5]))
    return found
