"""Timing shared by the kernel benchmarks."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def least_us(calls: Sequence[Callable[[], object]], seconds: float = 0.5) -> float:
    """Least time of a round through all calls, per call, in µs. The least of many, because cores are shared."""
    for call in calls:
        call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        for call in calls:
            call()
        times.append(time.perf_counter() - start)
    return min(times) / len(calls) * 1e6


def read_us(size_bytes: int, num_buffers: int) -> float:
    """Time to read size_bytes with torch on all its threads, cycling over num_buffers as the benchmark does."""
    buffers: list[Tensor] = [torch.ones(max(1, size_bytes // 4)) for _ in range(num_buffers)]
    return least_us([buffer.sum for buffer in buffers])


def copies_beyond_cache(size_bytes: int, cache_bytes: int = 64 << 20) -> int:
    """How many copies of the inputs to cycle over so that each call reads from memory."""
    return max(1, min(32, -(-cache_bytes // size_bytes)))
