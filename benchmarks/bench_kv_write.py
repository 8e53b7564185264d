"""µs and GB/s of writing a KV cache of bfloat16 or float8 on a GPU, in Llama-3-8B's shape, compared with torch.

Run: PYTHONPATH=kernels python benchmarks/bench_kv_write.py
"""

from collections.abc import Iterator

import torch
from gpu.kernel_bench import Case, run_bench
from gpu.timing import Call
from loraserve_kernels.kv_float8 import KV_FLOAT8
from loraserve_kernels.kv_write import kv_write_reference
from torch import Tensor

NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 128, 16
NUM_ROWS = (1, 16, 64, 256, 2048, 8192)

Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def make(num_rows: int, kv_dtype: torch.dtype, seed: int) -> Arguments:
    """k and v as slices of one fused output, slots spread over a cache with room for four times the rows."""
    torch.cuda.manual_seed(seed)
    fused = torch.randn(num_rows, 2 * NUM_KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    k, v = fused.split(NUM_KV_HEADS, dim=1)
    num_blocks = 4 * -(-num_rows // BLOCK_SIZE)
    shape = (num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    k_cache, v_cache = (torch.zeros(shape, device="cuda", dtype=torch.bfloat16).to(kv_dtype) for _ in range(2))
    slots = torch.randperm(num_blocks * BLOCK_SIZE, device="cuda")[:num_rows]
    return k, v, k_cache, v_cache, slots


def triton_call(num_rows: int, kv_dtype: torch.dtype, seed: int) -> Call:
    from loraserve_kernels.triton_ops.kv_write import kv_write

    arguments = make(num_rows, kv_dtype, seed)
    return lambda: kv_write(*arguments)


def torch_call(num_rows: int, kv_dtype: torch.dtype, seed: int) -> Call:
    arguments = make(num_rows, kv_dtype, seed)
    return lambda: kv_write_reference(*arguments)


def size_bytes(num_rows: int, kv_dtype: torch.dtype) -> int:
    """Bytes of K and V, read in bfloat16 and written in the cache's dtype, and of the slots."""
    return num_rows * (2 * NUM_KV_HEADS * HEAD_DIM * (2 + kv_dtype.itemsize) + 8)


def cases() -> Iterator[Case]:
    kv_dtypes = {"": torch.bfloat16}
    if torch.cuda.get_device_capability() >= (8, 9):
        kv_dtypes[", float8"] = KV_FLOAT8
    for suffix, kv_dtype in kv_dtypes.items():
        for num_rows in NUM_ROWS:
            for arm, make_call in (("triton", triton_call), ("torch", torch_call)):
                yield Case(
                    f"T{num_rows}{suffix}",
                    arm,
                    lambda seed, make_call=make_call, num_rows=num_rows, kv_dtype=kv_dtype: make_call(
                        num_rows, kv_dtype, seed
                    ),
                    size_bytes(num_rows, kv_dtype),
                )


if __name__ == "__main__":
    run_bench("kv_write", cases)
