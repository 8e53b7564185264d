"""Timing shared by the kernel benchmarks."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def least_us(calls: Sequence[Callable[[], object]], seconds: float = 0.5) -> float:
    """Least time of a single call in µs, cycling over the calls. The least of many, because cores are shared."""
    for call in calls:
        call()
    least, rounds, end = float("inf"), 0, time.perf_counter() + seconds
    while rounds < 5 or time.perf_counter() < end:
        rounds += 1
        for call in calls:
            start = time.perf_counter()
            call()
            least = min(least, time.perf_counter() - start)
    return least * 1e6


def read_us(size_bytes: int, num_buffers: int) -> float:
    """Time to read size_bytes with torch on all its threads, cycling over num_buffers as the benchmark does."""
    buffers: list[Tensor] = [torch.ones(max(1, size_bytes // 4)) for _ in range(num_buffers)]
    return least_us([buffer.sum for buffer in buffers])


def copy_us(size_bytes: int, num_buffers: int) -> float:
    """Time to copy size_bytes with torch on all its threads, cycling over num_buffers: it reads and writes as many."""
    buffers = [torch.ones(2, max(1, size_bytes // 4)) for _ in range(num_buffers)]
    return least_us([lambda to=to, of=of: to.copy_(of) for to, of in buffers])


def copies_beyond_cache(size_bytes: int, cache_bytes: int = 64 << 20) -> int:
    """How many copies of the inputs to cycle over so that each call reads from memory."""
    return max(1, min(32, -(-cache_bytes // size_bytes)))
