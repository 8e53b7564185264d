"""y += scaling * (hidden B + bias) for the adapter of each row, for all members of a group at once, then DoRA's scaling
of the sum; the second half of `lora_add`, after `lora_shrink`. For tiles of few rows see `lora_expand_rows`.
"""

# Python type checkers do not understand the launch options, constants and loops of kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl
from torch import Tensor

from loraserve_kernels.adapter_table import AdapterTable, LoraGroup
from loraserve_kernels.launch_sizes import ceil_div
from loraserve_kernels.lora_tiles import DECODE_MAX_ROWS, EXPAND_TILE_ROWS, expand_tile_rows
from loraserve_kernels.triton_ops.launch import launch, wait_for_inputs
from loraserve_kernels.triton_ops.lora_expand_rows import lora_expand_rows
from loraserve_kernels.triton_ops.lora_shared import (
    MAX_SPLITS,
    PREFILL_MAX_SPLITS,
    decode_planes,
    expand_arguments,
    expand_constants,
    expand_tile,
    load_magnitude,
    member_of_block,
    num_used_tiles,
)

DECODE_PROGRAMS = 1056
"""Eight for each of the 132 multiprocessors of an H100 or H200; see `lora_expand_rows.PROGRAMS`."""

MAX_GRID_Y = 65_535
"""CUDA's limit. Programs loop over tiles, since pairs of tokens and experts, with a tile each, may exceed it."""


@triton.jit
def _expand_tile(
    y_ptr,  # this and hidden_ptr: at the member's first column
    hidden_ptr,
    b_ptr,
    bias_ptr,
    has_bias,
    magnitude_ptr,
    has_magnitude,
    first_row,
    end_row,
    lora_rank,
    first_column,
    out_features,
    scaling,
    y_stride,
    num_planes,
    plane_stride,
    hidden_stride,
    MAX_PLANES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Add one adapter's product for up to BLOCK_M rows and BLOCK_N columns of one member; with DoRA, scale the sum."""
    row = first_row + tl.arange(0, BLOCK_M)
    is_row = row < end_row
    row = row.to(tl.int64)
    column = first_column + tl.arange(0, BLOCK_N)
    is_column = column < out_features
    y_block_ptr = y_ptr + row[:, None] * y_stride + column[None, :]
    is_y = is_row[:, None] & is_column[None, :]
    y = tl.load(y_block_ptr, mask=is_y)
    hidden_rows_ptr = hidden_ptr + row[:, None] * hidden_stride
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, lora_rank, BLOCK_R):
        rank = first + tl.arange(0, BLOCK_R)
        is_rank = rank < lora_rank
        b_block_ptr = b_ptr + rank[:, None].to(tl.int64) * out_features + column[None, :]
        b = tl.load(b_block_ptr, mask=is_rank[:, None] & is_column[None, :], other=0.0)
        # Ranks are not masked here: the rank need not be a multiple of 4, and a mask would prevent 16-byte loads.
        hidden_block_ptr = hidden_rows_ptr + rank[None, :]
        hidden = tl.load(hidden_block_ptr, mask=is_row[:, None], other=0.0)
        # Unrolled to MAX_PLANES, so that all loads are in flight at once; a masked load costs one instruction.
        for plane in tl.static_range(1, MAX_PLANES):
            plane_ptr = hidden_block_ptr + tl.cast(plane, tl.int64) * plane_stride
            is_plane = tl.full((BLOCK_M,), plane, tl.int32) < num_planes
            hidden += tl.load(plane_ptr, mask=(is_row & is_plane)[:, None], other=0.0)
        hidden = tl.where(is_rank[None, :], hidden, 0.0)
        # Tensor cores multiply numbers of one type. Rounding hidden to B's would not be float32 arithmetic, so for
        # bfloat16 there are two products, of hidden's upper and lower 8 bits: at 64 rows and rank 16 they cost a tenth
        # of moving y. float16 would overflow this way, but a float16 B is exact in TF32.
        if b.dtype == tl.bfloat16:
            upper = hidden.to(tl.bfloat16)
            lower = (hidden - upper.to(tl.float32)).to(tl.bfloat16)
            total = tl.dot(upper, b, total)
            total = tl.dot(lower, b, total)
        elif b.dtype == tl.float16:
            total = tl.dot(hidden, b.to(tl.float32), total, input_precision="tf32x3")
        else:
            total = tl.dot(hidden, b, total, input_precision="ieee")
    if has_bias:
        total += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    total = y.to(tl.float32) + total * scaling
    if has_magnitude:
        factor, shift = load_magnitude(magnitude_ptr, column, out_features)
        total = total * factor[None, :] + shift[None, :]
    tl.store(y_block_ptr, total.to(y.dtype), mask=is_y)


# Not recompiled if arguments that differ between batches or a model's layers are 1 or a multiple of 16.
@triton.jit(do_not_specialize=["most_planes", "num_tiles", "num_table_members", "member_start"])
def _lora_expand_kernel(
    y_ptr,  # [num_rows, sum(OUT_FEATURES)]
    hidden_ptr,  # float32 [most_planes, num_rows, hidden_stride]
    arena_ptr,
    tiles_ptr,  # int32 [num_tiles, 6]
    offset_b_ptr,  # int64 [num_slots, num_table_members]; the next four likewise
    offset_bias_ptr,
    offset_magnitude_ptr,
    lora_rank_ptr,
    scaling_ptr,
    y_stride,
    most_planes,
    plane_stride,
    hidden_stride,
    num_tiles,
    num_table_members,
    member_start,
    OUT_FEATURES: tl.constexpr,
    MEMBER_COLUMNS: tl.constexpr,
    MAX_PLANES: tl.constexpr,
    HAS_BIASES: tl.constexpr,
    HAS_MAGNITUDES: tl.constexpr,
    OFFSET_ALIGNMENT: tl.constexpr,
    TARGET_PROGRAMS: tl.constexpr,
    IS_DECODE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_inputs(IS_DEPENDENT)
    block = tl.program_id(0)
    member, out_features, member_column, member_block = member_of_block(block, OUT_FEATURES, BLOCK_N)
    num_planes = most_planes
    if IS_DECODE:
        num_planes = decode_planes(num_used_tiles(tiles_ptr, num_tiles), most_planes, TARGET_PROGRAMS)

    # NOTE: unused entries come last. The next entry's slot is loaded while this one is computed.
    tile = tl.program_id(1)
    adapter_slot = tl.load(expand_tile(tiles_ptr, tile))
    while adapter_slot >= 0:
        tile_ptr = expand_tile(tiles_ptr, tile)
        tile += tl.num_programs(1)
        next_slot = tl.load(expand_tile(tiles_ptr, tile), mask=tile < num_tiles, other=-1)
        index = adapter_slot.to(tl.int64) * num_table_members + member_start + member
        lora_rank = tl.load(lora_rank_ptr + index)
        offset_bias = tl.full((), -1, tl.int64)
        if HAS_BIASES:
            offset_bias = tl.load(offset_bias_ptr + index)
        offset_magnitude = tl.full((), -1, tl.int64)
        if HAS_MAGNITUDES:
            offset_magnitude = tl.load(offset_magnitude_ptr + index)
        if (lora_rank > 0) | (offset_bias >= 0):
            _expand_tile(
                y_ptr + member_column,
                hidden_ptr + member * MEMBER_COLUMNS,
                arena_ptr + tl.multiple_of(tl.load(offset_b_ptr + index), OFFSET_ALIGNMENT),
                arena_ptr + offset_bias,
                offset_bias >= 0,
                arena_ptr + tl.multiple_of(offset_magnitude, OFFSET_ALIGNMENT),
                offset_magnitude >= 0,
                tl.load(tile_ptr + 1),
                tl.load(tile_ptr + 2),
                lora_rank,
                (block - member_block) * BLOCK_N,
                out_features,
                tl.load(scaling_ptr + index),
                y_stride,
                num_planes,
                plane_stride,
                hidden_stride,
                MAX_PLANES,
                BLOCK_M,
                BLOCK_N,
                BLOCK_R,
            )
        adapter_slot = next_slot


def lora_expand(y: Tensor, hidden: Tensor, group: LoraGroup, table: AdapterTable, tiles: Tensor) -> None:
    """Add to y in place; arguments as checked by `lora_add`, hidden from `lora_shrink` with the same tiles.

    Rows in no tile and columns of absent members are neither read nor written. The sum is rounded once, to y's dtype.
    """
    num_rows, num_tiles = y.shape[0], tiles.shape[0]
    if expand_tile_rows(num_rows) == EXPAND_TILE_ROWS:
        lora_expand_rows(y, hidden, group, table, tiles)
        return
    is_decode = num_rows <= DECODE_MAX_ROWS
    # The number of planes differs between batches with the same number of rows: if it were a constant, kernels would be
    # compiled while serving.
    max_planes = MAX_SPLITS if is_decode else PREFILL_MAX_SPLITS
    assert hidden.shape[0] <= max_planes, f"{hidden.shape[0]} planes, at most {max_planes} are summed"
    # Compiled for sm_90, the decode and prefill kernels take 156 and 128 registers per thread, so a multiprocessor runs
    # three and four programs, each with 8 KiB of loads in flight. Blocks of 64 x 128 took 171 with 8 warps, so it ran
    # one; 64 x 64 would take 142 without the limit.
    block_n = 256 if is_decode else 64
    column_blocks = sum(ceil_div(columns, block_n) for columns in group.out_features)
    tile_programs = min(num_tiles, max(DECODE_PROGRAMS // column_blocks, 1) if is_decode else MAX_GRID_Y)
    launch(
        _lora_expand_kernel,
        (column_blocks, tile_programs),
        y,
        *expand_arguments(y, hidden, group, table, tiles),
        **expand_constants(group, table),
        MAX_PLANES=max_planes,
        IS_DECODE=is_decode,
        BLOCK_M=expand_tile_rows(num_rows),
        BLOCK_N=block_n,
        BLOCK_R=16,
        num_warps=4,
        num_stages=2 if is_decode else 1,
        maxnreg=None if is_decode else 128,
        enable_fp_fusion=True,
    )
