"""Rotate queries in place, and keys while they are stored in the cache together with the values."""

# Python type checkers do not understand the launch options, constants and loops of kernels.
# pyright: reportCallIssue=false, reportArgumentType=false

import triton
import triton.language as tl
from torch import Tensor

from loraserve_kernels.launch_sizes import ceil_div, power_of_2
from loraserve_kernels.triton_ops.kv_float8 import kept
from loraserve_kernels.triton_ops.launch import launch, wait_for_inputs

_TILE = 2048
"""Elements per program: 16 heads of 128, so a Llama-3-8B row takes two programs for Q and one for K and V."""


@triton.jit
def _rotate(x_ptr, out_ptr, cos_ptr, sin_ptr, mask, half, HALF: tl.constexpr):
    """x_ptr, out_ptr: [HEADS, 1] first elements of heads, may be equal; cos_ptr, sin_ptr: first elements of the row."""
    columns = tl.arange(0, HALF)[None, :]
    is_turned = columns < half
    mask = mask & is_turned
    low = tl.load(x_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(x_ptr + half + columns, mask=mask, other=0.0).to(tl.float32)
    low_cos = tl.load(cos_ptr + columns, mask=is_turned, other=0.0).to(tl.float32)
    low_sin = tl.load(sin_ptr + columns, mask=is_turned, other=0.0).to(tl.float32)
    high_cos = tl.load(cos_ptr + half + columns, mask=is_turned, other=0.0).to(tl.float32)
    high_sin = tl.load(sin_ptr + half + columns, mask=is_turned, other=0.0).to(tl.float32)
    tl.store(out_ptr + columns, kept(low * low_cos - high * low_sin, out_ptr), mask=mask)
    tl.store(out_ptr + half + columns, kept(high * high_cos + low * high_sin, out_ptr), mask=mask)


@triton.jit
def _rotary_kv_write_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_ptr,
    num_heads,
    num_kv_heads,
    head_dim,
    rotary_dim,
    block_size,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HALF: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_inputs(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row)
    if slot < 0:
        return
    half = rotary_dim // 2
    cos_ptr += row * rotary_dim
    sin_ptr += row * rotary_dim
    num_q_blocks = tl.cdiv(num_heads, HEADS)
    block = tl.program_id(1)
    if block < num_q_blocks:
        heads = block * HEADS + tl.arange(0, HEADS)[:, None].to(tl.int64)
        q_heads_ptr = q_ptr + row * q_row_stride + heads * q_head_stride
        _rotate(q_heads_ptr, q_heads_ptr, cos_ptr, sin_ptr, heads < num_heads, half, HALF)
    else:
        heads = (block - num_q_blocks) * HEADS + tl.arange(0, HEADS)[:, None].to(tl.int64)
        is_head = heads < num_kv_heads
        columns = tl.arange(0, COLUMNS)[None, :]
        cache_row = ((slot // block_size) * num_kv_heads + heads) * block_size + slot % block_size
        k_heads_ptr = k_ptr + row * k_row_stride + heads * k_head_stride
        k_slot_ptr = k_cache_ptr + cache_row * head_dim
        _rotate(k_heads_ptr, k_slot_ptr, cos_ptr, sin_ptr, is_head, half, HALF)
        if rotary_dim < head_dim:
            is_rest = is_head & (columns >= rotary_dim) & (columns < head_dim)
            rest = tl.load(k_heads_ptr + columns, mask=is_rest)
            tl.store(k_slot_ptr + columns, kept(rest, k_cache_ptr), mask=is_rest)
        mask = is_head & (columns < head_dim)
        v = tl.load(v_ptr + row * v_row_stride + heads * v_head_stride + columns, mask=mask)
        tl.store(v_cache_ptr + cache_row * head_dim + columns, kept(v, v_cache_ptr), mask=mask)


def rotary_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """`Backend.rotary_kv_write`; rows whose slot is -1 (padding of a captured graph) are skipped, including their q."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, rotary_dim = k.shape[1], cos.shape[1]
    if not q.numel():
        return
    columns = power_of_2(head_dim)
    heads = min(power_of_2(max(num_heads, num_kv_heads)), max(1, _TILE // columns))
    launch(
        _rotary_kv_write_kernel,
        (num_rows, ceil_div(num_heads, heads) + ceil_div(num_kv_heads, heads)),
        q,
        k,
        v,
        cos,
        sin,
        k_cache,
        v_cache,
        slot_mapping,
        num_heads,
        num_kv_heads,
        head_dim,
        rotary_dim,
        k_cache.shape[2],
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        HEADS=heads,
        COLUMNS=columns,
        HALF=power_of_2(max(1, rotary_dim // 2)),
        num_warps=4,
        enable_fp_fusion=True,
    )
