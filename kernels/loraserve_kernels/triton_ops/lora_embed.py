"""y += embed_scale * scaling * A[:, token] B for the adapter of each row."""

# Python type checkers do not understand the launch options, constants and loops of kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl
from torch import Tensor

from loraserve_kernels.adapter_table import AdapterTable, LoraGroup
from loraserve_kernels.launch_sizes import ceil_div
from loraserve_kernels.lora_tiles import expand_tile_rows
from loraserve_kernels.triton_ops.launch import launch, wait_for_inputs
from loraserve_kernels.triton_ops.lora_shared import TARGET_PROGRAMS, expand_tile

_BLOCK_ELEMENTS = 2048
"""Rows times columns per program, so that it needs few registers."""


# Not recompiled if arguments that differ between batches are 1 or a multiple of 16.
@triton.jit(do_not_specialize=["num_tiles", "group_index", "member"])
def _lora_embed_kernel(
    y_ptr,  # [num_rows, out_features]
    token_ids_ptr,  # int64 [num_rows]
    arena_ptr,
    tiles_ptr,  # int32 [num_tiles, 6]
    offset_a_ptr,  # int64 [num_slots, num_groups]
    offset_b_ptr,  # int64 [num_slots, num_members]; the next two likewise
    lora_rank_ptr,
    scaling_ptr,
    embed_scale,
    y_stride,
    num_tiles,
    num_groups,
    num_members,
    group_index,
    member,
    num_embeddings,
    out_features,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_inputs(IS_DEPENDENT)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < out_features
    # NOTE: unused entries come last.
    tile = tl.program_id(1)
    adapter_slot = tl.load(expand_tile(tiles_ptr, tile)).to(tl.int64)
    while adapter_slot >= 0:
        index = adapter_slot * num_members + member
        lora_rank = tl.load(lora_rank_ptr + index)
        if lora_rank > 0:
            tile_ptr = expand_tile(tiles_ptr, tile)
            row = tl.load(tile_ptr + 1) + tl.arange(0, BLOCK_M)
            is_row = row < tl.load(tile_ptr + 2)
            row = row.to(tl.int64)
            token_id = tl.load(token_ids_ptr + row, mask=is_row, other=0)
            a_ptr = arena_ptr + tl.load(offset_a_ptr + adapter_slot * num_groups + group_index) + token_id
            b_ptr = arena_ptr + tl.load(offset_b_ptr + index) + column
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for _ in range(lora_rank):
                a = tl.load(a_ptr, mask=is_row, other=0.0).to(tl.float32)
                b = tl.load(b_ptr, mask=is_column, other=0.0).to(tl.float32)
                total += a[:, None] * b[None, :]
                a_ptr += num_embeddings
                b_ptr += out_features
            scaling = tl.load(scaling_ptr + index)
            y_block_ptr = y_ptr + row[:, None] * y_stride + column[None, :]
            is_y = is_row[:, None] & is_column[None, :]
            y = tl.load(y_block_ptr, mask=is_y)
            total = y.to(tl.float32) + total * (scaling * embed_scale)
            tl.store(y_block_ptr, total.to(y.dtype), mask=is_y)
        tile += tl.num_programs(1)
        adapter_slot = tl.load(expand_tile(tiles_ptr, tile), mask=tile < num_tiles, other=-1).to(tl.int64)


def lora_embed(
    y: Tensor, token_ids: Tensor, embed_scale: float, group: LoraGroup, table: AdapterTable, tiles: Tensor
) -> None:
    """Add to y in place; arguments as checked by `check_lora_embed`. Rows in no tile are neither read nor written."""
    (out_features,) = group.out_features
    block_m = expand_tile_rows(y.shape[0])
    block_n = min(_BLOCK_ELEMENTS // block_m, 128)
    column_blocks = ceil_div(out_features, block_n)
    launch(
        _lora_embed_kernel,
        (column_blocks, min(tiles.shape[0], max(2 * TARGET_PROGRAMS // column_blocks, 1))),
        y,
        token_ids,
        table.arena,
        tiles,
        table.offset_a,
        table.offset_b,
        table.lora_rank,
        table.scaling,
        embed_scale,
        y.stride(0),
        tiles.shape[0],
        table.offset_a.shape[1],
        table.lora_rank.shape[1],
        group.group_index,
        group.member_start,
        group.in_features,
        out_features,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=4,
        enable_fp_fusion=True,
    )
