"""µs and GB/s of decode attention on a GPU, compared with the byte floor, torch's over dense caches, and other splits.

Run: PYTHONPATH=kernels python benchmarks/bench_paged_decode.py
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from gpu.attention import Workload, dense_case, paged_case
from gpu.kernel_bench import Case, run_bench
from loraserve_kernels.kv_float8 import KV_FLOAT8

UNIFORM = [
    Workload("decode 1 x 8192", [8192], [1]),
    Workload("decode 16 x 1024", [1024] * 16, [1] * 16),
    Workload("decode 64 x 2048", [2048] * 64, [1] * 64),
    Workload("decode 256 x 1024", [1024] * 256, [1] * 256),
    Workload("decode 8 x 32768", [32_768] * 8, [1] * 8),
]
OTHERS = [
    Workload("decode 131072 + 63 x 512", [131_072] + [512] * 63, [1] * 64),
    Workload("decode 64 x 256 .. 8192", [256 * (1 + i % 32) for i in range(64)], [1] * 64),
    Workload("decode 16 x 8192, window 1024, 8/4 x 256", [8192] * 16, [1] * 16, 8, 4, 256, 1024),
    Workload("decode 16 x 8192, softcap, 16/8 x 256", [8192] * 16, [1] * 16, 16, 8, 256, None, 50.0),
    Workload("16 rows after 8176", [8192], [16]),
    Workload("4 rows each of 16 x 2048", [2048] * 16, [4] * 16),
]


def cases() -> Iterator[Case]:
    for workload in (*UNIFORM, *OTHERS):
        yield paged_case(workload)
    if torch.cuda.get_device_capability() >= (8, 9):
        for workload in UNIFORM:
            yield paged_case(replace(workload, name=f"{workload.name}, float8", kv_dtype=KV_FLOAT8))
    for workload in UNIFORM:
        yield dense_case(workload)
    for workload in (*UNIFORM[:2], *OTHERS[:2]):
        for programs_per_sm in (2, 8):
            yield paged_case(workload, f"ours, {programs_per_sm}/SM", programs_per_sm)


if __name__ == "__main__":
    run_bench("paged_decode", cases)
