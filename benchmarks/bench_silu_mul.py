"""µs and GB/s of silu(gate) * up on a GPU, compared with torch's two operations.

Run: PYTHONPATH=kernels python benchmarks/bench_silu_mul.py
"""

from collections.abc import Iterator

import torch
from gpu.kernel_bench import Case, run_bench
from gpu.timing import Call
from torch import Tensor

SIZE = 14336
NUM_ROWS = (1, 16, 64, 256, 2048, 8192)


def make(num_rows: int, seed: int) -> tuple[Tensor, ...]:
    """(gate, up): halves of one fused output."""
    torch.cuda.manual_seed(seed)
    return torch.randn(num_rows, 2 * SIZE, device="cuda").bfloat16().split(SIZE, dim=1)


def triton_call(num_rows: int, seed: int) -> Call:
    from loraserve_kernels.triton_ops.silu_mul import silu_mul

    gate, up = make(num_rows, seed)
    return lambda: silu_mul(gate, up)


def torch_call(num_rows: int, seed: int) -> Call:
    gate, up = make(num_rows, seed)
    return lambda: torch.nn.functional.silu(gate) * up


def cases() -> Iterator[Case]:
    for num_rows in NUM_ROWS:
        for arm, make_call in (("triton", triton_call), ("torch", torch_call)):
            yield Case(
                f"T{num_rows} N{SIZE}",
                arm,
                lambda seed, make_call=make_call, num_rows=num_rows: make_call(num_rows, seed),
                2 * 3 * num_rows * SIZE,
            )


if __name__ == "__main__":
    run_bench("silu_mul", cases)
