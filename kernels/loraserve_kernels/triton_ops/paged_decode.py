"""Attention of one row or a few: programs share the keys of a context, and a second kernel merges their parts."""

# Python type checkers do not understand the launch options, constants and loops of kernels.
# pyright: reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraserve_kernels.attention_work import PROGRAMS_PER_SM
from loraserve_kernels.launch_sizes import ceil_div
from loraserve_kernels.step_batch import StepBatch
from loraserve_kernels.triton_ops.attention_tile import (
    Scores,
    attend_keys,
    first_state,
    key_tile,
    padded,
    query_tile,
    sinks_or,
)
from loraserve_kernels.triton_ops.launch import launch, wait_for_inputs

MAX_QUERIES = 64
"""Query vectors per tile: what a Hopper warp group multiplies. More take several tiles, and each reads K and V."""

SMALL_TILE = 16 * 128
"""Largest tile of query vectors, in elements, with which `PROGRAMS_PER_SM` fit: in decode, up to 16 heads a kv head."""

LARGE_TILE_BYTES = 16 * 1024
"""Larger tiles of query vectors get 8 warps. With 4, a tile of 32 at head_dim 256 in float32 spilled 7 KB."""

MAX_REGISTERS = 65536 // (128 * PROGRAMS_PER_SM)
"""Per thread, with tiles of up to `SMALL_TILE`. Without this limit, at head_dim 128, Triton 3.6 takes 127 registers and
3.9 takes 145. With it, 3.9 spills nothing there and 3.6 spills 8 bytes; with a window and sinks 3.9 spills 24."""

MERGE_ELEMENTS = 2048
"""Elements of partial results that a merging program loads at once."""

MERGE_ROW_PROGRAMS = 4
"""Programs that share the rows of a tile when merging. The list of splits has its maximum length, and nearly all of its
entries have nothing to merge: a program per row would be 16 per entry, nearly all of which end at once; one program for
all rows would wait for its loads 16 times, row after row.
"""


# Not recompiled for block tables of another width.
@triton.jit(do_not_specialize=["stride_table"])
def _paged_decode_kernel(
    out,
    partial,
    partial_log,
    q,
    k_cache,
    v_cache,
    sinks,
    block_table,
    context_lens,
    row_start,
    num_rows,
    splits,
    stride_q_row,
    stride_q_head,
    stride_block,
    stride_head,
    stride_table,
    inner_scale,
    scale,
    sliding_window,
    MAX_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Program (split, kv head, query tile). Query vector i is head i % GROUP of the tile's row i // GROUP.

    The output of an undivided context is written to out. A part's output is written to partial, normalized, and the
    base-2 logarithm of its total weight to partial_log: -inf if a row sees none of its keys.
    """
    wait_for_inputs(IS_DEPENDENT)
    split, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence = tl.load(splits + split * 4).to(tl.int64)
    if sequence < 0:
        return
    first_row = tl.load(splits + split * 4 + 1)
    part = tl.load(splits + split * 4 + 2)
    num_parts = tl.load(splits + split * 4 + 3)
    context_len = tl.load(context_lens + sequence)
    rows, rows_left = 1, 1
    if MAX_ROWS > 1:
        rows_left = tl.load(num_rows + sequence) - first_row
        rows = tl.minimum(rows_left, MAX_ROWS)
    num_queries = rows * GROUP
    first_query = tl.program_id(2) * QUERIES
    if first_query >= num_queries:
        return
    before = context_len - rows_left  # position of the tile's first row
    end_key = before + rows
    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(before - sliding_window + 1, 0)
    first_tile = first_key // KEYS
    num_tiles = tl.cdiv(end_key, KEYS) - first_tile
    begin = (first_tile + part * num_tiles // num_parts) * KEYS
    end = (first_tile + (part + 1) * num_tiles // num_parts) * KEYS

    query = first_query + tl.arange(0, QUERIES)
    has_query = query < num_queries
    head = kv_head * GROUP + query % GROUP
    dim = tl.arange(0, BLOCK_DIM)
    stored = has_query[:, None] & (dim < HEAD_DIM)[None, :]
    row = tl.load(row_start + sequence).to(tl.int64) + first_row + query // GROUP
    q_offset = row * stride_q_row + head.to(tl.int64) * stride_q_head
    queries = tl.load(q + q_offset[:, None] + dim[None, :], mask=stored, other=0.0)
    num_sinks = tl.where(part == 0, num_queries, 0)
    maximum, total = first_state(sinks, head, query < num_sinks, HAS_SINKS, QUERIES)
    output = tl.zeros((QUERIES, BLOCK_DIM), tl.float32)
    output, maximum, total = attend_keys(
        output,
        maximum,
        total,
        queries,
        before + query // GROUP,
        k_cache + kv_head.to(tl.int64) * stride_head,
        v_cache + kv_head.to(tl.int64) * stride_head,
        block_table + sequence * stride_table,
        begin,
        end,
        first_key,
        end_key,
        stride_block,
        inner_scale,
        scale,
        sliding_window,
        True,
        HAS_WINDOW,
        HAS_SOFTCAP,
        HEAD_DIM,
        BLOCK_DIM,
        BLOCK_SIZE,
        KEYS,
    )
    total = tl.where(total > 0.0, total, 1.0)
    output = output / total[:, None]
    if num_parts == 1:
        out_offset = (row * NUM_HEADS + head) * HEAD_DIM
        tl.store(out + out_offset[:, None] + dim[None, :], output.to(out.dtype.element_ty), stored)
    else:
        at = (split * MAX_ROWS + query // GROUP) * NUM_HEADS + head
        tl.store(partial_log + at, maximum + tl.log2(total), has_query)
        tl.store(partial + at[:, None] * HEAD_DIM + dim[None, :], output, stored)


@triton.jit
def _merge_kernel(
    out,
    partial,
    partial_log,
    row_start,
    num_rows,
    splits,
    MAX_ROWS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    ROW_PROGRAMS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Program (split, head, first row): the program of a tile's first part sums all its parts, in order."""
    wait_for_inputs(IS_DEPENDENT)
    split, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence = tl.load(splits + split * 4).to(tl.int64)
    first_row = tl.load(splits + split * 4 + 1)
    part = tl.load(splits + split * 4 + 2)
    num_parts = tl.load(splits + split * 4 + 3)
    if (part != 0) | (num_parts == 1):  # part is -1 in unused entries
        return
    first_of_rows, end_of_rows = 0, 1
    if MAX_ROWS > 1:  # otherwise there is one row
        first_of_rows = tl.program_id(2)
        end_of_rows = tl.minimum(tl.load(num_rows + sequence) - first_row, MAX_ROWS)
    dim = tl.arange(0, BLOCK_DIM)
    for row in range(first_of_rows, end_of_rows, ROW_PROGRAMS):
        output = tl.zeros((BLOCK_DIM,), tl.float32)
        maximum, total = float("-inf"), 0.0
        for first in range(0, num_parts, PARTS):
            index = first + tl.arange(0, PARTS)
            at = ((split + index) * MAX_ROWS + row) * NUM_HEADS + head
            log = tl.load(partial_log + at, mask=index < num_parts, other=float("-inf"))
            mask = (index < num_parts)[:, None] & (dim < HEAD_DIM)[None, :]
            values = tl.load(partial + at[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
            new_maximum = tl.maximum(maximum, tl.max(log, 0))
            shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            fade, weights = tl.exp2(maximum - shift), tl.exp2(log - shift)
            output = output * fade + tl.sum(weights[:, None] * values, 0)
            total = total * fade + tl.sum(weights, 0)
            maximum = new_maximum
        out_row = tl.load(row_start + sequence).to(tl.int64) + first_row + row
        out_offset = (out_row * NUM_HEADS + head) * HEAD_DIM
        tl.store(out + out_offset + dim, (output / total).to(out.dtype.element_ty), dim < HEAD_DIM)


def paged_decode(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: StepBatch,
    splits: Tensor,
    max_rows: int,
    *,
    scores: Scores,
    sliding_window: int | None,
    sinks: Tensor | None,
) -> None:
    """Write those rows of out: [T, num_heads, head_dim], dense, that are in splits, and no others.

    splits: `AttentionWork.decode_splits` with max_rows 1, `append_splits` with `APPEND_ROWS`. The caller checks
    arguments.
    """
    num_splits, (_, num_heads, head_dim) = splits.shape[0], q.shape
    num_kv_heads, block_size = k_cache.shape[1], k_cache.shape[2]
    if num_splits == 0:
        return
    group, block_dim = num_heads // num_kv_heads, padded(head_dim)
    queries = query_tile(max_rows * group, MAX_QUERIES, q.dtype)
    is_small = queries * block_dim <= SMALL_TILE and q.dtype.itemsize == 2
    keys = key_tile(block_dim, q.dtype)
    if k_cache.dtype.itemsize < q.dtype.itemsize:
        keys = max(16, keys // 2)  # K and V are widened in registers
    # Sizes depend on shapes alone: nothing here may depend on how many splits are used.
    partial = torch.empty(num_splits, max_rows, num_heads, head_dim, dtype=torch.float32, device=q.device)
    partial_log = torch.empty(num_splits, max_rows, num_heads, dtype=torch.float32, device=q.device)
    launch(
        _paged_decode_kernel,
        (num_splits, num_kv_heads, ceil_div(max_rows * group, queries)),
        out,
        partial,
        partial_log,
        q,
        k_cache,
        v_cache,
        sinks_or(sinks, q),
        batch.block_table,
        batch.context_lens,
        batch.row_start,
        batch.num_rows,
        splits,
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        batch.block_table.stride(0),
        scores.inner_scale,
        scores.scale,
        sliding_window or 0,
        MAX_ROWS=max_rows,
        GROUP=group,
        NUM_HEADS=num_heads,
        HAS_WINDOW=sliding_window is not None,
        HAS_SOFTCAP=scores.softcap is not None,
        HAS_SINKS=sinks is not None,
        HEAD_DIM=head_dim,
        BLOCK_DIM=block_dim,
        QUERIES=queries,
        BLOCK_SIZE=block_size,
        KEYS=keys,
        num_warps=8 if queries * block_dim * q.dtype.itemsize > LARGE_TILE_BYTES else 4,
        num_stages=3,
        maxnreg=MAX_REGISTERS if is_small else None,
        enable_fp_fusion=True,
    )
    row_programs = min(max_rows, MERGE_ROW_PROGRAMS)
    launch(
        _merge_kernel,
        (num_splits, num_heads, row_programs),
        out,
        partial,
        partial_log,
        batch.row_start,
        batch.num_rows,
        splits,
        MAX_ROWS=max_rows,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_DIM=block_dim,
        PARTS=MERGE_ELEMENTS // block_dim,
        ROW_PROGRAMS=row_programs,
        num_warps=2,
        enable_fp_fusion=True,
    )
