"""What the LoRA kernels have in common: where their tiles are, and what both forms of `lora_expand` are given."""

# Kernels are another language, of whose constants and loops a type checker of Python knows nothing.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl
from torch import Tensor

from loraserve_kernels.adapter_table import MAX_LORA_RANK, AdapterTable, LoraGroup


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
        "OFFSET_ALIGNMENT": table.offset_alignment,
    }
