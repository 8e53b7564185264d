"""µs of prefill attention on a GPU, compared with the arithmetic floor and torch's attention over dense K and V.

Run: PYTHONPATH=kernels python benchmarks/bench_paged_prefill.py
"""

from collections.abc import Iterator

from gpu.attention import Workload, dense_case, paged_case
from gpu.kernel_bench import Case, run_bench

WITHOUT_PREFIX = [
    Workload("prefill 1 x 2048", [2048], [2048]),
    Workload("prefill 1 x 8192", [8192], [8192]),
    Workload("prefill 8 x 512", [512] * 8, [512] * 8),
    Workload("prefill 1 x 8192, 32/32 x 64", [8192], [8192], 32, 32, 64),
]
OTHERS = [
    Workload("prefill 512 after 7680", [8192], [512]),
    Workload("prefill 2048 after 63488", [65_536], [2048]),
    Workload("prefill 1 x 8192, window 1024, 8/4 x 256", [8192], [8192], 8, 4, 256, 1024),
    Workload("prefill 1 x 8192, softcap, 16/8 x 256", [8192], [8192], 16, 8, 256, None, 50.0),
    Workload("prefill 1024 + 63 decoding at 1024", [1024] * 64, [1024] + [1] * 63),
]


def cases() -> Iterator[Case]:
    for workload in (*WITHOUT_PREFIX, *OTHERS):
        yield paged_case(workload)
    for workload in WITHOUT_PREFIX:
        yield dense_case(workload)


if __name__ == "__main__":
    run_bench("paged_prefill", cases)
