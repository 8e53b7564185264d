"""Finds out which pages of a tensor are in memory, and releases them."""

import ctypes
import mmap
import sys

from torch import Tensor

MADV_DONTNEED = 4
MADV_POPULATE_WRITE = 23


def can_populate() -> bool:
    """Whether `madvise` can populate pages: Linux 5.14 and newer."""
    if sys.platform != "linux":
        return False
    with mmap.mmap(-1, mmap.PAGESIZE) as probe:
        try:
            probe.madvise(MADV_POPULATE_WRITE)
        except OSError:
            return False
    return True


def resident_pages(tensor: Tensor) -> list[bool]:
    """Whether each page that holds a byte of the tensor is in memory, in order."""
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    num_bytes = tensor.data_ptr() + tensor.nbytes - start
    flags = (ctypes.c_ubyte * -(-num_bytes // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), flags) != 0:
        raise OSError(ctypes.get_errno(), "mincore")
    return [bool(flag & 1) for flag in flags]


def give_back(tensor: Tensor) -> None:
    """Release the pages that hold nothing else, as if they were new: malloc may have returned memory used before."""
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_DONTNEED) != 0:
        raise OSError(ctypes.get_errno(), "madvise")
