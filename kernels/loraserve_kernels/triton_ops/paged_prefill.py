"""Attention of sequences with many rows: large tiles of query vectors, each over all keys it sees."""

# Python type checkers do not understand the launch options, constants and loops of kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraserve_kernels.attention_work import PREFILL_ROWS
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

MAX_QUERIES = 128
"""Query vectors per tile: 64 for each of two of Hopper's warp groups. Half as many would read K and V from L2 at 64
bytes per clock and SM, its maximum."""

LARGE_SHARED_BYTES = 128 * 1024
"""Shared memory of a multiprocessor with room for `MAX_QUERIES` at head_dim 256: they take 104 KiB, on Hopper 128 KiB.
With compute capability 8.6, 8.9 or 12.0 a program gets 99 KiB; half as many queries take 68 KiB."""


# Not recompiled for block tables of another width.
@triton.jit(do_not_specialize=["stride_table"])
def _paged_prefill_kernel(
    out,
    q,
    k_cache,
    v_cache,
    sinks,
    block_table,
    context_lens,
    row_start,
    num_rows,
    tiles,
    stride_q_row,
    stride_q_head,
    stride_block,
    stride_head,
    stride_table,
    inner_scale,
    scale,
    sliding_window,
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
    """Program (tile, query tile in it, kv head). Query vector i of a tile is head i % GROUP of its row i // GROUP."""
    wait_for_inputs(IS_DEPENDENT)
    tile, kv_head = tl.program_id(0), tl.program_id(2)
    sequence = tl.load(tiles + tile * 3).to(tl.int64)
    if sequence < 0:
        return
    first_row = tl.load(tiles + tile * 3 + 1)
    num_queries = (tl.load(tiles + tile * 3 + 2) - first_row) * GROUP
    first_query = tl.program_id(1) * QUERIES
    if first_query >= num_queries:
        return
    context_len = tl.load(context_lens + sequence)
    before = context_len - tl.load(num_rows + sequence) + first_row  # position of the tile's first row
    last_query = tl.minimum(first_query + QUERIES, num_queries) - 1
    first_position, last_position = before + first_query // GROUP, before + last_query // GROUP
    # Key tiles start at multiples of KEYS; keys outside first_key .. end_key are masked.
    end_key = last_position + 1
    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(first_position - sliding_window + 1, 0)
    begin = first_key // KEYS * KEYS
    seen_by_all = begin
    if HAS_WINDOW:
        seen_by_all = tl.cdiv(tl.maximum(last_position - sliding_window + 1, 0), KEYS) * KEYS
    diagonal = tl.maximum((first_position + 1) // KEYS * KEYS, seen_by_all)

    query = tl.minimum(first_query + tl.arange(0, QUERIES), last_query)  # the last is repeated, so that each sees a key
    has_row = first_query + tl.arange(0, QUERIES) < num_queries
    head = kv_head * GROUP + query % GROUP
    dim = tl.arange(0, BLOCK_DIM)
    stored = has_row[:, None] & (dim < HEAD_DIM)[None, :]
    row = tl.load(row_start + sequence).to(tl.int64) + first_row + query // GROUP
    q_offset = row * stride_q_row + head.to(tl.int64) * stride_q_head
    queries = tl.load(q + q_offset[:, None] + dim[None, :], mask=stored, other=0.0)
    position = before + query // GROUP
    k_cache += kv_head.to(tl.int64) * stride_head
    v_cache += kv_head.to(tl.int64) * stride_head
    blocks = block_table + sequence * stride_table
    maximum, total = first_state(sinks, head, has_row, HAS_SINKS, QUERIES)
    output = tl.zeros((QUERIES, BLOCK_DIM), tl.float32)
    for phase in tl.static_range(3):  # keys that only some rows see, that all see, that only the last rows see
        if phase > 0 or HAS_WINDOW:
            output, maximum, total = attend_keys(
                output,
                maximum,
                total,
                queries,
                position,
                k_cache,
                v_cache,
                blocks,
                begin if phase == 0 else (seen_by_all if phase == 1 else diagonal),
                tl.minimum(seen_by_all, end_key) if phase == 0 else (diagonal if phase == 1 else end_key),
                first_key,
                end_key,
                stride_block,
                inner_scale,
                scale,
                sliding_window,
                phase != 1,
                HAS_WINDOW,
                HAS_SOFTCAP,
                HEAD_DIM,
                BLOCK_DIM,
                BLOCK_SIZE,
                KEYS,
            )
    output = output / total[:, None]
    out_offset = (row * NUM_HEADS + head) * HEAD_DIM
    tl.store(out + out_offset[:, None] + dim[None, :], output.to(out.dtype.element_ty), stored)


def shared_bytes(device: torch.device) -> int:
    """Shared memory of a multiprocessor; a program gets at most 1 KiB less."""
    if device.type != "cuda":
        return LARGE_SHARED_BYTES  # the interpreter
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor


def max_queries(block_dim: int, device: torch.device) -> int:
    """Maximum query vectors per tile: fewer for wider heads, so that they fit into shared memory."""
    if block_dim <= 128:
        return MAX_QUERIES
    return MAX_QUERIES * (256 if shared_bytes(device) >= LARGE_SHARED_BYTES else 128) // block_dim


def paged_prefill(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: StepBatch,
    tiles: Tensor,
    *,
    scores: Scores,
    sliding_window: int | None,
    sinks: Tensor | None,
) -> None:
    """Write those rows of out: [T, num_heads, head_dim], dense, that are in tiles, and no others.

    tiles: `AttentionWork.prefill_tiles`. The caller checks arguments.
    """
    num_tiles, (_, num_heads, head_dim) = tiles.shape[0], q.shape
    num_kv_heads, block_size = k_cache.shape[1], k_cache.shape[2]
    if num_tiles == 0:
        return
    group, block_dim = num_heads // num_kv_heads, padded(head_dim)
    most_queries = min(PREFILL_ROWS, q.shape[0]) * group
    queries = query_tile(most_queries, max_queries(block_dim, q.device), q.dtype)
    launch(
        _paged_prefill_kernel,
        (num_tiles, ceil_div(most_queries, queries), num_kv_heads),
        out,
        q,
        k_cache,
        v_cache,
        sinks_or(sinks, q),
        batch.block_table,
        batch.context_lens,
        batch.row_start,
        batch.num_rows,
        tiles,
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        batch.block_table.stride(0),
        scores.inner_scale,
        scores.scale,
        sliding_window or 0,
        GROUP=group,
        NUM_HEADS=num_heads,
        HAS_WINDOW=sliding_window is not None,
        HAS_SOFTCAP=scores.softcap is not None,
        HAS_SINKS=sinks is not None,
        HEAD_DIM=head_dim,
        BLOCK_DIM=block_dim,
        QUERIES=queries,
        BLOCK_SIZE=block_size,
        KEYS=key_tile(block_dim, q.dtype),
        num_warps=8 if queries == MAX_QUERIES or block_dim > 128 else 4,
        num_stages=3,
        enable_fp_fusion=True,
    )
