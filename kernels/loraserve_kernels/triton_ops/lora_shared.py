"""Shared by the LoRA kernels: addresses of tiles, the number of planes into which `lora_shrink` splits its sum, and the
arguments of both forms of `lora_expand`.
"""

# Python type checkers do not understand the constants and loops of kernels.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl
from torch import Tensor

from loraserve_kernels.adapter_table import MAX_LORA_RANK, AdapterTable, LoraGroup

TARGET_PROGRAMS = 528
"""Four for each of the 132 multiprocessors of an H100 or H200; a decode batch's work is split into about as many."""

MAX_SPLITS = 16
PREFILL_MAX_SPLITS = 4
"""`lora_expand` reads every plane again for each block of columns: 4 planes of rank 16 are as many bytes as it moves
of y."""


@triton.jit
def num_used_tiles(tiles_ptr, num_tiles):
    """Tiles in use in `lora_shrink`'s list: stated by its last entry if that is unused."""
    last_ptr = shrink_tile(tiles_ptr, num_tiles - 1)
    return tl.where(tl.load(last_ptr) >= 0, num_tiles, tl.load(last_ptr + 1))


@triton.jit
def decode_planes(num_used, most_planes, TARGET_PROGRAMS: tl.constexpr):
    """The number of planes into which the sum over in_features is split: the largest power of two, at most most_planes,
    with which num_used tiles give at most TARGET_PROGRAMS programs.

    It depends on the tiles in use, not on the list's length: a graph has room for a tile per row. If all rows share one
    adapter, a sixteenth of them is in use, and a split for the full list would leave most multiprocessors idle.
    """
    planes = 1
    for i in tl.static_range(4):
        doubled = 2 << i
        planes = tl.where((doubled <= most_planes) & (num_used * doubled <= TARGET_PROGRAMS), doubled, planes)
    return planes


@triton.jit
def shrink_tile(tiles_ptr, index):
    """Pointer to (adapter_slot, first_row, end_row) in `lora_shrink`'s list, the first half of `Segments.tiles`."""
    return tiles_ptr + index * 6


@triton.jit
def expand_tile(tiles_ptr, index):
    """The same in `lora_expand`'s list, the second half."""
    return tiles_ptr + index * 6 + 3


@triton.jit
def member_of_block(block, OUT_FEATURES: tl.constexpr, BLOCK_N: tl.constexpr):
    """(member, its out_features, its first column, its first block): members' blocks follow one another."""
    member = 0
    out_features = OUT_FEATURES[0]
    member_column = 0
    member_block = 0
    num_columns = 0
    num_blocks = 0
    for i in tl.static_range(1, len(OUT_FEATURES)):
        num_columns += OUT_FEATURES[i - 1]
        num_blocks += (OUT_FEATURES[i - 1] + BLOCK_N - 1) // BLOCK_N
        is_after = block >= num_blocks
        member = tl.where(is_after, i, member)
        out_features = tl.where(is_after, OUT_FEATURES[i], out_features)
        member_column = tl.where(is_after, num_columns, member_column)
        member_block = tl.where(is_after, num_blocks, member_block)
    return member, out_features, member_column, member_block


@triton.jit
def load_magnitude(magnitude_ptr, column, out_features):
    """(factors, shifts) of these columns, float32 in an arena of any dtype."""
    factor_ptr = magnitude_ptr.to(tl.pointer_type(tl.float32)) + column
    is_column = column < out_features
    factor = tl.load(factor_ptr, mask=is_column, other=0.0)
    return factor, tl.load(factor_ptr + out_features, mask=is_column, other=0.0)


def expand_arguments(
    y: Tensor, hidden: Tensor, group: LoraGroup, table: AdapterTable, tiles: Tensor
) -> tuple[object, ...]:
    """The arguments of both kernels, in order, after y and before the constants."""
    return (
        hidden,
        table.arena,
        tiles,
        table.offset_b,
        table.offset_bias,
        table.offset_magnitude,
        table.lora_rank,
        table.scaling,
        y.stride(0),
        hidden.shape[0],
        hidden.stride(0),
        hidden.stride(1),
        tiles.shape[0],
        table.lora_rank.stride(0),
        group.member_start,
    )


def expand_constants(group: LoraGroup, table: AdapterTable) -> dict[str, object]:
    """The constants of both kernels that the model determines."""
    return {
        "OUT_FEATURES": group.out_features,
        "MEMBER_COLUMNS": MAX_LORA_RANK,
        "HAS_BIASES": table.offset_bias.numel() > 0,
        "HAS_MAGNITUDES": table.offset_magnitude.numel() > 0,
        "OFFSET_ALIGNMENT": table.offset_alignment,
        "TARGET_PROGRAMS": TARGET_PROGRAMS,
    }
