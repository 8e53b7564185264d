"""The number of threads of our CPU ops: torch's, unless torch itself is to use one."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_num_threads: int | None = None
"""While torch uses one thread."""


def num_threads() -> int:
    """For an op that is about to run."""
    return torch.get_num_threads() if _num_threads is None else _num_threads


@contextmanager
def torch_on_one_thread() -> Iterator[None]:
    """In the block, torch's operations run on this thread alone; our ops do not.

    Torch's threads spin while they wait for each other. Between two of our ops, which have threads of their own, they
    take CPUs from these, and one that has lost its CPU to another process delays a step by a time slice.
    Not to be nested, and not for concurrent use.
    """
    global _num_threads
    _num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(_num_threads)
        _num_threads = None
