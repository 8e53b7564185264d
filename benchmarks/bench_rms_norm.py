"""µs and GB/s of RMSNorm on a GPU: alone, compared with torch's, and fused with the preceding residual addition.

Run: PYTHONPATH=kernels python benchmarks/bench_rms_norm.py
"""

from collections.abc import Iterator

import torch
from gpu.kernel_bench import Case, run_bench
from gpu.timing import Call
from torch import Tensor

EPS = 1e-5
SIZES = (4096, 14336)
NUM_ROWS = (1, 16, 64, 256, 2048, 8192)


def make(num_rows: int, size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(x, residual, weight)"""
    torch.cuda.manual_seed(seed)
    x, residual = torch.randn(2, num_rows, size, device="cuda").bfloat16()
    return x, residual, torch.rand(size, device="cuda").bfloat16()


def triton_norm(num_rows: int, size: int, seed: int) -> Call:
    from loraserve_kernels.triton_ops.rms_norm import rms_norm

    x, _, weight = make(num_rows, size, seed)
    return lambda: rms_norm(x, weight, EPS)


def torch_norm(num_rows: int, size: int, seed: int) -> Call:
    x, _, weight = make(num_rows, size, seed)
    return lambda: torch.nn.functional.rms_norm(x, (size,), weight, EPS)


def triton_add(num_rows: int, size: int, seed: int) -> Call:
    from loraserve_kernels.triton_ops.rms_norm import add_rms_norm

    x, residual, weight = make(num_rows, size, seed)
    return lambda: add_rms_norm(x, residual, weight, EPS)


def separate_add(num_rows: int, size: int, seed: int) -> Call:
    from loraserve_kernels.triton_ops.rms_norm import rms_norm

    x, residual, weight = make(num_rows, size, seed)
    return lambda: rms_norm(x + residual, weight, EPS)


def triton_heads(num_rows: int, num_heads: int, seed: int) -> Call:
    """The first `num_heads` of 48 heads of 128 in a fused output."""
    from loraserve_kernels.triton_ops.rms_norm import rms_norm

    torch.cuda.manual_seed(seed)
    fused = torch.randn(num_rows, 48, 128, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(128, device="cuda", dtype=torch.bfloat16)
    return lambda: rms_norm(fused[:, :num_heads], weight, EPS)


def cases() -> Iterator[Case]:
    for size in SIZES:
        for num_rows in NUM_ROWS:
            norm_bytes, add_bytes = 2 * (2 * num_rows + 1) * size, 2 * (4 * num_rows + 1) * size
            for name, arm, make_call, size_bytes in (
                ("norm", "triton", triton_norm, norm_bytes),
                ("norm", "torch", torch_norm, norm_bytes),
                ("add and norm", "triton", triton_add, add_bytes),
                ("add and norm", "separate", separate_add, add_bytes),
            ):
                yield Case(
                    f"{name} T{num_rows} D{size}",
                    arm,
                    lambda seed, make_call=make_call, num_rows=num_rows, size=size: make_call(num_rows, size, seed),
                    size_bytes,
                )
    for num_rows in NUM_ROWS:
        size_bytes = 2 * 2 * num_rows * 32 * 128
        name = f"norm T{num_rows} of 32 heads of 128"
        yield Case(name, "triton", lambda seed, num_rows=num_rows: triton_heads(num_rows, 32, seed), size_bytes)


if __name__ == "__main__":
    run_bench("rms_norm", cases)
