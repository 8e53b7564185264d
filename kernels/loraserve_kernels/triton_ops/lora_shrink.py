"""hidden = x Aᵀ for the adapter of each row, for all members of a group at once; the first half of `lora_add`.

The sum over in_features is split into planes that the second half, `lora_expand`, adds in a fixed order: no atomics, no
clearing, the same bits in every run.
"""

# Python type checkers do not understand the launch options, constants and loops of kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraserve_kernels.adapter_table import MAX_LORA_RANK, AdapterTable, LoraGroup
from loraserve_kernels.lora_tiles import LORA_TILE_ROWS, tile_rows
from loraserve_kernels.triton_ops.launch import launch, wait_for_inputs
from loraserve_kernels.triton_ops.lora_shared import (
    MAX_SPLITS,
    PREFILL_MAX_SPLITS,
    TARGET_PROGRAMS,
    decode_planes,
    num_used_tiles,
    shrink_tile,
)

PREFILL_TARGET_PROGRAMS = 132
"""One for each multiprocessor: with large tiles, that is enough loads in flight."""

MIN_SPLIT_FEATURES = 256
"""Two blocks of bfloat16: with fewer features, starting a program costs more than its loads."""

MAX_RANK_PROGRAMS = 16
"""Programs that share the ranks of one tile; if ranks are small, all but the first few end at once."""


def num_splits(num_tiles: int, in_features: int, *, is_decode: bool) -> int:
    """Planes of the sum over in_features, from shapes alone: a power of two. A decode batch uses all only if few of its
    tiles are in use, see `decode_planes`."""
    wanted = MAX_SPLITS if is_decode else min(PREFILL_MAX_SPLITS, PREFILL_TARGET_PROGRAMS // num_tiles)
    return 1 << max(min(wanted, in_features // MIN_SPLIT_FEATURES).bit_length() - 1, 0)


# Not recompiled if arguments that differ between batches or a model's layers are 1 or a multiple of 16.
@triton.jit(
    do_not_specialize=[
        "most_planes",
        "num_tiles",
        "num_groups",
        "num_table_members",
        "group_index",
        "member_start",
    ]
)
def _lora_shrink_kernel(
    hidden_ptr,  # float32 [most_planes, num_rows, hidden_stride]
    x_ptr,  # [num_rows, in_features]
    arena_ptr,
    tiles_ptr,  # int32 [num_tiles, 6]
    offset_a_ptr,  # int64 [num_slots, num_groups]
    lora_rank_ptr,  # int32 [num_slots, num_table_members]
    x_stride,
    in_features,
    most_planes,
    plane_stride,
    hidden_stride,
    num_tiles,
    num_groups,
    num_table_members,
    group_index,
    member_start,
    NUM_MEMBERS: tl.constexpr,
    MEMBER_COLUMNS: tl.constexpr,
    OFFSET_ALIGNMENT: tl.constexpr,
    TARGET_PROGRAMS: tl.constexpr,
    MAX_RANK_PROGRAMS: tl.constexpr,
    IS_DECODE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_inputs(IS_DEPENDENT)
    num_used = num_used_tiles(tiles_ptr, num_tiles)
    num_planes = most_planes
    if IS_DECODE:
        num_planes = decode_planes(num_used, most_planes, TARGET_PROGRAMS)
    num_parts = num_used * num_planes  # the programs of a part take its ranks in turn
    if num_parts == 0:
        return
    rank_programs = tl.minimum(tl.maximum(tl.num_programs(0) // num_parts, 1), MAX_RANK_PROGRAMS)
    part = tl.program_id(0) % num_parts
    rank_program = tl.program_id(0) // num_parts
    if rank_program >= rank_programs:
        return
    tile_ptr = shrink_tile(tiles_ptr, part % num_used)
    split = part // num_used
    adapter_slot = tl.load(tile_ptr).to(tl.int64)
    rank_ptr = lora_rank_ptr + adapter_slot * num_table_members + member_start
    stacked_rank = 0
    for member in tl.static_range(NUM_MEMBERS):
        stacked_rank += tl.load(rank_ptr + member)

    row = tl.load(tile_ptr + 1) + tl.arange(0, BLOCK_M)
    is_row = row < tl.load(tile_ptr + 2)
    row = row.to(tl.int64)
    x_rows_ptr = x_ptr + row[:, None] * x_stride
    offset_a = tl.load(offset_a_ptr + adapter_slot * num_groups + group_index)
    a_ptr = arena_ptr + tl.multiple_of(offset_a, OFFSET_ALIGNMENT)
    split_features = tl.cdiv(tl.cdiv(in_features, num_planes), BLOCK_K) * BLOCK_K
    first_feature = split * split_features
    end_feature = tl.minimum(first_feature + split_features, in_features)
    hidden_rows_ptr = hidden_ptr + split.to(tl.int64) * plane_stride + row[:, None] * hidden_stride

    for first_rank in range(rank_program * BLOCK_R, stacked_rank, rank_programs * BLOCK_R):
        rank = first_rank + tl.arange(0, BLOCK_R)
        is_rank = rank < stacked_rank
        a_rows_ptr = a_ptr + rank[None, :].to(tl.int64) * in_features
        total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for first in range(first_feature, end_feature, BLOCK_K):
            feature = first + tl.arange(0, BLOCK_K)
            is_feature = feature < end_feature
            x = tl.load(x_rows_ptr + feature[None, :], mask=is_row[:, None] & is_feature[None, :], other=0.0)
            a = tl.load(a_rows_ptr + feature[:, None], mask=is_feature[:, None] & is_rank[None, :], other=0.0)
            total = tl.dot(x, a, total, input_precision="ieee")
        column, member_end = rank, 0
        for member in tl.static_range(NUM_MEMBERS - 1):
            member_end += tl.load(rank_ptr + member)
            column = tl.where(rank >= member_end, (member + 1) * MEMBER_COLUMNS + rank - member_end, column)
        tl.store(hidden_rows_ptr + column[None, :], total, mask=is_row[:, None] & is_rank[None, :])


def lora_shrink(x: Tensor, group: LoraGroup, table: AdapterTable, tiles: Tensor) -> Tensor:
    """float32 [planes, T, num_members * MAX_LORA_RANK]. The planes add up to x Aᵀ, in a decode batch the first
    `decode_planes` of them. Arguments as checked by `lora_add`.

    A member's ranks start at column member * MAX_LORA_RANK. All other elements, also base rows, are undefined.
    """
    num_rows, num_tiles, num_members = x.shape[0], tiles.shape[0], len(group.out_features)
    is_decode = tile_rows(num_rows) == LORA_TILE_ROWS
    planes = num_splits(num_tiles, group.in_features, is_decode=is_decode)
    hidden = torch.empty(planes, num_rows, num_members * MAX_LORA_RANK, dtype=torch.float32, device=x.device)
    num_programs = min(max(num_tiles, TARGET_PROGRAMS), num_tiles * planes * MAX_RANK_PROGRAMS)
    launch(
        _lora_shrink_kernel,
        (num_programs,),
        hidden,
        x,
        table.arena,
        tiles,
        table.offset_a,
        table.lora_rank,
        x.stride(0),
        group.in_features,
        planes,
        hidden.stride(0),
        hidden.stride(1),
        num_tiles,
        table.offset_a.stride(0),
        table.lora_rank.stride(0),
        group.group_index,
        group.member_start,
        NUM_MEMBERS=num_members,
        MEMBER_COLUMNS=MAX_LORA_RANK,
        OFFSET_ALIGNMENT=table.offset_alignment,
        TARGET_PROGRAMS=TARGET_PROGRAMS,
        MAX_RANK_PROGRAMS=MAX_RANK_PROGRAMS,
        IS_DECODE=is_decode,
        BLOCK_M=tile_rows(num_rows),
        BLOCK_R=32 if is_decode else 64,
        BLOCK_K=(256 if is_decode else 128) // x.element_size(),
        num_warps=4,
        num_stages=4,
        enable_fp_fusion=True,
    )
    return hidden
