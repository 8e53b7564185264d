"""Timing shared by the GPU benchmarks: CUDA graphs over rotated arguments, and bandwidths measured in the same run.

One `replay_us` sample is one replay of a graph that goes through every argument set, so a set is read again only after
all the others, which together are larger than the cache.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

MIN_NODES = 32
"""Least calls per graph: the start of a replay, about 10 µs, is spread over them."""
POOL_BYTES = 256 << 20
"""All argument sets together: four times the 60 MB of an H200's L2 cache."""
MAX_SETS = 256
PROBE_BYTES = 1 << 30
"""Size of the buffers for measuring bandwidths: far larger than the cache."""

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Times:
    """Time of one call in µs, over the replays."""

    median_us: float
    p10_us: float
    p90_us: float


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this GPU reaches in this run."""

    copy_bytes_per_s: float
    """Bytes read plus bytes written of a device-to-device copy."""
    read_bytes_per_s: float
    """A sum over float32."""
    flops_per_s: float
    """A bfloat16 product of 8192 x 8192 matrices."""
    launch_us: float
    """One node of a graph that does next to nothing."""

    @property
    def bytes_per_s(self) -> float:
        """The larger of the two bandwidths."""
        return max(self.copy_bytes_per_s, self.read_bytes_per_s)

    def floor_us(self, size_bytes: float, flops: float) -> float:
        """The least time for work that moves and computes this much: the largest of byte, FLOP and launch floors."""
        return max(size_bytes / self.bytes_per_s * 1e6, flops / self.flops_per_s * 1e6, self.launch_us)


def require_cuda() -> None:
    """Exit with a one-line message if there is no GPU."""
    if not torch.cuda.is_available():
        sys.exit("No CUDA device: GPU benchmarks measure nothing here. Run them on a machine with an NVIDIA GPU.")


def pool_size(size_bytes: int) -> int:
    """Number of argument sets of this size to rotate over."""
    return max(2, min(MAX_SETS, -(-POOL_BYTES // max(1, size_bytes))))


def replay_us(calls: Sequence[Call], repeats: int = 15) -> Times:
    """Time per call in a CUDA graph of all calls in turn, at least `MIN_NODES`. The calls' arguments must stay alive.

    Each call must be capturable: no host synchronization, no shape that depends on values.
    """
    rounds = -(-MIN_NODES // len(calls))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # compiles, and fills the allocator
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    for _ in range(3):
        graph.replay()
    samples = [event_us(graph.replay) / (rounds * len(calls)) for _ in range(repeats)]
    deciles = statistics.quantiles(samples, n=10)
    return Times(statistics.median(samples), deciles[0], deciles[-1])


def event_us(call: Call) -> float:
    """GPU time of one call, without a graph."""
    started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    started.record()
    call()
    ended.record()
    ended.synchronize()
    return started.elapsed_time(ended) * 1e3


def measure_ceilings() -> Ceilings:
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    dots = [torch.zeros(1, device="cuda") for _ in range(MIN_NODES)]
    return Ceilings(
        copy_bytes_per_s=copy_bytes_per_s(),
        read_bytes_per_s=read_bytes_per_s(),
        flops_per_s=2e6 * 8192**3 / median_us(lambda: left @ right),
        launch_us=replay_us([dot.zero_ for dot in dots]).median_us,
    )


def copy_bytes_per_s(device: str = "cuda", probe_bytes: int = PROBE_BYTES) -> float:
    """Bytes read plus bytes written of a copy within the device's memory."""
    source = torch.randn(probe_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2e6 * probe_bytes / median_us(lambda: target.copy_(source), device)


def read_bytes_per_s(device: str = "cuda", probe_bytes: int = PROBE_BYTES) -> float:
    """Bandwidth of a sum over float32."""
    return 1e6 * probe_bytes / median_us(torch.randn(probe_bytes // 4, device=device).sum, device)


def median_us(call: Call, device: str = "cuda") -> float:
    """Time of one call: the median of 11 after 3 that warm up. On a CPU by the wall clock, for tests."""
    time_us = clock_us if device == "cpu" else event_us
    for _ in range(3):
        call()
    return statistics.median(time_us(call) for _ in range(11))


def clock_us(call: Call) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e6
