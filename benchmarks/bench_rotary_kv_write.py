"""µs and GB/s of rotating queries and keys and writing the KV cache on a GPU, in Llama-3-8B's shape, against torch.

Run: PYTHONPATH=kernels python benchmarks/bench_rotary_kv_write.py
"""

from collections.abc import Iterator

import torch
from gpu.kernel_bench import Case, run_bench
from gpu.timing import Call
from loraserve_kernels.rotary_kv_write import rotary_kv_write_reference
from torch import Tensor

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
NUM_ROWS = (1, 16, 64, 256, 2048, 8192)

Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def make(num_rows: int, seed: int) -> Arguments:
    """q, k and v as slices of one fused output, slots spread over a cache with room for four times the rows."""
    torch.cuda.manual_seed(seed)
    fused = torch.randn(num_rows, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    q, k, v = fused.split((NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS), dim=1)
    num_blocks = 4 * -(-num_rows // BLOCK_SIZE)
    caches = torch.zeros(2, num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    angles = torch.rand(num_rows, HEAD_DIM, device="cuda") * 6
    slots = torch.randperm(num_blocks * BLOCK_SIZE, device="cuda")[:num_rows]
    return q, k, v, angles.cos().bfloat16(), angles.sin().bfloat16(), caches[0], caches[1], slots


def triton_call(num_rows: int, seed: int) -> Call:
    from loraserve_kernels.triton_ops.rotary_kv_write import rotary_kv_write

    arguments = make(num_rows, seed)
    return lambda: rotary_kv_write(*arguments)


def torch_call(num_rows: int, seed: int) -> Call:
    arguments = make(num_rows, seed)
    return lambda: rotary_kv_write_reference(*arguments)


def cases() -> Iterator[Case]:
    row_bytes = 2 * (2 * NUM_HEADS + 4 * NUM_KV_HEADS + 2) * HEAD_DIM + 8
    for num_rows in NUM_ROWS:
        for arm, make_call in (("triton", triton_call), ("torch", torch_call)):
            yield Case(
                f"rotate and write T{num_rows}",
                arm,
                lambda seed, make_call=make_call, num_rows=num_rows: make_call(num_rows, seed),
                num_rows * row_bytes,
            )


if __name__ == "__main__":
    run_bench("rotary_kv_write", cases)
