"""Copy the step's K and V rows to their cache slots."""

# Python type checkers do not understand the launch options, constants and loops of kernels.
# pyright: reportCallIssue=false, reportArgumentType=false

import triton
import triton.language as tl
from torch import Tensor

from loraserve_kernels.launch_sizes import ceil_div, power_of_2
from loraserve_kernels.triton_ops.kv_float8 import kept
from loraserve_kernels.triton_ops.launch import launch, wait_for_inputs

_TILE = 2048
"""Elements of K per program, and as many of V; the 8 heads of 128 of a Llama-3-8B row take half of this."""


@triton.jit
def _kv_write_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_ptr,
    num_heads,
    head_dim,
    block_size,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_inputs(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row)
    if slot < 0:
        return
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None].to(tl.int64)
    columns = tl.arange(0, COLUMNS)[None, :]
    mask = (heads < num_heads) & (columns < head_dim)
    cache_row = ((slot // block_size) * num_heads + heads) * block_size + slot % block_size
    offset = cache_row * head_dim + columns
    k = tl.load(k_ptr + row * k_row_stride + heads * k_head_stride + columns, mask=mask)
    v = tl.load(v_ptr + row * v_row_stride + heads * v_head_stride + columns, mask=mask)
    tl.store(k_cache_ptr + offset, kept(k, k_cache_ptr), mask=mask)
    tl.store(v_cache_ptr + offset, kept(v, v_cache_ptr), mask=mask)


def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """`Backend.kv_write`; rows whose slot is -1 (padding of a captured graph) are skipped."""
    num_rows, num_heads, head_dim = k.shape
    if not k.numel():
        return
    columns = power_of_2(head_dim)
    heads = min(power_of_2(num_heads), max(1, _TILE // columns))
    launch(
        _kv_write_kernel,
        (num_rows, ceil_div(num_heads, heads)),
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        num_heads,
        head_dim,
        k_cache.shape[2],
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        HEADS=heads,
        COLUMNS=columns,
        num_warps=4,
        enable_fp_fusion=True,
    )
