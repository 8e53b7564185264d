"""`lora_expand` for tiles of few rows, as in decode batches: as fast as B can be read.

A tensor core multiplies at least 16 rows: with one to four, its tiles are mostly empty, and their registers could serve
loads in flight. Here a program is one warp: it loads a block of B for up to `EXPAND_TILE_ROWS` rows, and adds in
float32.
"""

# Python type checkers do not understand the launch options, constants and loops of kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl
from torch import Tensor

from loraserve_kernels.adapter_table import AdapterTable, LoraGroup
from loraserve_kernels.launch_sizes import ceil_div
from loraserve_kernels.lora_tiles import EXPAND_TILE_ROWS
from loraserve_kernels.triton_ops.launch import launch, wait_for_inputs
from loraserve_kernels.triton_ops.lora_shared import (
    MAX_SPLITS,
    decode_planes,
    expand_arguments,
    expand_constants,
    expand_tile,
    load_magnitude,
    member_of_block,
    num_used_tiles,
)

PROGRAMS = 4224
"""32 for each of the 132 multiprocessors of an H100 or H200, each a warp. A decode batch has as many tiles as rows if
each row has its own adapter, and few if all share one, but the same grid: a program takes one tile after the other, up
to the first unused one.
"""

BLOCK_BYTES = 256
"""Bytes of a row of B per program: half of what its threads could load at once, so that registers suffice."""
MAX_REGISTERS = 168
"""Per thread, so that twelve programs fit on a multiprocessor."""
BLOCK_R = 16


@triton.jit
def _product(planes, row, b, MAX_PLANES: tl.constexpr, BLOCK_R: tl.constexpr):
    """float32 [BLOCK_N]: one row of hidden, summed over its planes, times b; zeros for a row past the tile's end."""
    hidden_row_ptr, hidden_stride, num_rows, num_planes, plane_stride, first, lora_rank = planes
    plane = tl.arange(0, MAX_PLANES)
    rank = first + tl.arange(0, BLOCK_R)
    planes_ptr = hidden_row_ptr + row * hidden_stride + plane[:, None].to(tl.int64) * plane_stride + rank[None, :]
    is_plane = plane < tl.where(row < num_rows, num_planes, 0)
    mask = is_plane[:, None] & (rank < lora_rank)[None, :]
    hidden = tl.sum(tl.load(planes_ptr, mask=mask, other=0.0), axis=0)
    return tl.sum(hidden[:, None] * b.to(tl.float32), axis=0)


@triton.jit
def _add_row(y_row_ptr, y_stride, row, num_rows, added, magnitude, column, out_features):
    has_magnitude, factor, shift = magnitude
    mask = column < tl.where(row < num_rows, out_features, 0)
    y_row_ptr += row * y_stride
    y = tl.load(y_row_ptr, mask=mask)
    total = y.to(tl.float32) + added
    if has_magnitude:  # otherwise keep the bits: a factor of 1 and a shift of 0 would turn -0.0 into 0.0
        total = total * factor + shift
    tl.store(y_row_ptr, total.to(y.dtype), mask=mask)


@triton.jit
def _block_of_b(b_columns_ptr, out_features, is_column, first, lora_rank, BLOCK_R: tl.constexpr):
    """[BLOCK_R, BLOCK_N]: rows of B from `first` on; zeros from lora_rank on."""
    rank = first + tl.arange(0, BLOCK_R)
    b_ptr = b_columns_ptr[None, :] + rank[:, None].to(tl.int64) * out_features
    return tl.load(b_ptr, mask=(rank < lora_rank)[:, None] & is_column[None, :], other=0.0)


# Not recompiled if arguments that differ between batches or a model's layers are 1 or a multiple of 16.
@triton.jit(do_not_specialize=["most_planes", "num_tiles", "num_table_members", "member_start"])
def _lora_expand_rows_kernel(
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
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_inputs(IS_DEPENDENT)
    block = tl.program_id(0)
    member, out_features, member_column, member_block = member_of_block(block, OUT_FEATURES, BLOCK_N)
    column = (block - member_block) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < out_features
    y_columns_ptr = y_ptr + member_column + column
    hidden_ptr += member * MEMBER_COLUMNS

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
            scaling = tl.load(scaling_ptr + index)
            b_columns_ptr = arena_ptr + tl.multiple_of(tl.load(offset_b_ptr + index), OFFSET_ALIGNMENT) + column
            row = tl.load(tile_ptr + 1).to(tl.int64)
            num_rows = tl.load(tile_ptr + 2) - row
            y_row_ptr = y_columns_ptr + row * y_stride
            hidden_row_ptr = hidden_ptr + row * hidden_stride
            bias = tl.zeros((BLOCK_N,), tl.float32)
            if offset_bias >= 0:
                bias += tl.load(arena_ptr + offset_bias + column, mask=is_column, other=0.0).to(tl.float32)
            total0, total1, total2, total3 = bias, bias, bias, bias
            for first in range(0, lora_rank, BLOCK_R):
                b = _block_of_b(b_columns_ptr, out_features, is_column, first, lora_rank, BLOCK_R)
                planes = (hidden_row_ptr, hidden_stride, num_rows, num_planes, plane_stride, first, lora_rank)
                total0 += _product(planes, 0, b, MAX_PLANES, BLOCK_R)
                if num_rows > 1:
                    total1 += _product(planes, 1, b, MAX_PLANES, BLOCK_R)
                    total2 += _product(planes, 2, b, MAX_PLANES, BLOCK_R)
                    total3 += _product(planes, 3, b, MAX_PLANES, BLOCK_R)
            factor, shift = tl.zeros((BLOCK_N,), tl.float32), tl.zeros((BLOCK_N,), tl.float32)
            if offset_magnitude >= 0:
                magnitude_ptr = arena_ptr + tl.multiple_of(offset_magnitude, OFFSET_ALIGNMENT)
                factor, shift = load_magnitude(magnitude_ptr, column, out_features)
            magnitude = (offset_magnitude >= 0, factor, shift)
            _add_row(y_row_ptr, y_stride, 0, num_rows, total0 * scaling, magnitude, column, out_features)
            if num_rows > 1:
                _add_row(y_row_ptr, y_stride, 1, num_rows, total1 * scaling, magnitude, column, out_features)
                _add_row(y_row_ptr, y_stride, 2, num_rows, total2 * scaling, magnitude, column, out_features)
                _add_row(y_row_ptr, y_stride, 3, num_rows, total3 * scaling, magnitude, column, out_features)
        adapter_slot = next_slot


def lora_expand_rows(y: Tensor, hidden: Tensor, group: LoraGroup, table: AdapterTable, tiles: Tensor) -> None:
    """See `lora_expand`."""
    assert EXPAND_TILE_ROWS == 4, "the kernel is unrolled for 4 rows"
    assert hidden.shape[0] <= MAX_SPLITS, f"{hidden.shape[0]} planes, at most {MAX_SPLITS} are summed"
    num_tiles = tiles.shape[0]
    block_n = BLOCK_BYTES // table.arena.element_size()
    column_blocks = sum(ceil_div(columns, block_n) for columns in group.out_features)
    launch(
        _lora_expand_rows_kernel,
        (column_blocks, min(num_tiles, max(PROGRAMS // column_blocks, 1))),
        y,
        *expand_arguments(y, hidden, group, table, tiles),
        **expand_constants(group, table),
        MAX_PLANES=MAX_SPLITS,
        BLOCK_N=block_n,
        BLOCK_R=BLOCK_R,
        num_warps=1,
        maxnreg=MAX_REGISTERS,
        enable_fp_fusion=True,
    )
