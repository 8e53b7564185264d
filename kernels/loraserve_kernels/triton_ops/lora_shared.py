"""What the LoRA kernels have in common: where their tiles are, into how many planes the sum between them is split, and
what both forms of `lora_expand` are given.
"""

# Kernels are another language, of whose constants and loops a type checker of Python knows nothing.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl
from torch import Tensor

from loraserve_kernels.adapter_table import MAX_LORA_RANK, AdapterTable, LoraGroup

TARGET_PROGRAMS = 528
"""Four for each of the 132 multiprocessors of an H100 or H200; the work of a decode batch is split to have as many."""

MAX_SPLITS = 16
PREFILL_MAX_SPLITS = 4
"""`lora_expand` reads every plane again for each block of its columns: 4 of rank 16 are as many bytes as it moves of
y."""


@triton.jit
def num_used_tiles(tiles_ptr, num_tiles):
    """Of `lora_shrink`'s list: what an unused entry says, which are the last ones."""
    last_ptr = shrink_tile(tiles_ptr, num_tiles - 1)
    return tl.where(tl.load(last_ptr) >= 0, num_tiles, tl.load(last_ptr + 1))


@triton.jit
def decode_planes(num_used, most_planes, TARGET_PROGRAMS: tl.constexpr):
    """Into how many planes the sum over in_features is split: the largest power of two, at most most_planes, that makes
    of the tiles no more than TARGET_PROGRAMS.

    Of those in use, not of the list's length: a graph has room for a tile a row, of which one adapter's rows use a
    sixteenth, and split as if all were in use they would leave most multiprocessors idle.
    """
    planes = 1
    for i in tl.static_range(4):
        doubled = 2 << i
        planes = tl.where((doubled <= most_planes) & (num_used * doubled <= TARGET_PROGRAMS), doubled, planes)
    return planes


@triton.jit
def shrink_tile(tiles_ptr, index):
    """To (adapter_slot, first_row, end_row) of `lora_shrink`'s list, the first half of `Segments.tiles`."""
    return tiles_ptr + index * 6


@triton.jit
def expand_tile(tiles_ptr, index):
    """The same of `lora_expand`'s, the second half."""
    return tiles_ptr + index * 6 + 3


@triton.jit
def member_of_block(block, OUT_FEATURES: tl.constexpr, BLOCK_N: tl.constexpr):
    """(member, its columns, its first column, its first block): the blocks of one come after those of the other."""
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
    """Of both kernels, in their order, behind y and up to what is constant."""
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
    """Of both kernels, what follows from the model."""
    return {
        "OUT_FEATURES": group.out_features,
        "MEMBER_COLUMNS": MAX_LORA_RANK,
        "HAS_BIASES": table.offset_bias.numel() > 0,
        "HAS_MAGNITUDES": table.offset_magnitude.numel() > 0,
        "OFFSET_ALIGNMENT": table.offset_alignment,
        "TARGET_PROGRAMS": TARGET_PROGRAMS,
    }
