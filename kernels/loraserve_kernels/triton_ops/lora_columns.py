"""Which member of a group a block of its columns belongs to."""

# Kernels are another language, of whose constants and loops a type checker of Python knows nothing.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl


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
