"""Shared by paged decode and prefill: query vectors packed over all heads of a kv head, and keys read in tiles."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraserve_kernels.launch_sizes import power_of_2

LOG2_E = tl.constexpr(1.4426950408889634)

MAX_QUERIES_FLOAT32 = 32
"""Tensor cores do not multiply float32, and the products of a larger tile do not fit into registers."""


@dataclass(slots=True)
class Scores:
    """Converts dot products q · k to base-2 logits, so that weights are exp2: the GPU has no other exp."""

    scaling: float
    softcap: float | None

    @property
    def inner_scale(self) -> float:
        """Multiplies the dot product before the softcap's tanh, which is computed as 1 - 2 / (exp2(x) + 1)."""
        return 1.0 if self.softcap is None else self.scaling * 2 * LOG2_E.value / self.softcap

    @property
    def scale(self) -> float:
        """Multiplies the dot product, or with a softcap the tanh."""
        return (self.scaling if self.softcap is None else self.softcap) * LOG2_E.value


def padded(size: int, least: int = 16) -> int:
    """The smallest power of two not below size, and at least 16, tl.dot's minimum."""
    return max(least, power_of_2(size))


def query_tile(num_queries: int, most: int, dtype: torch.dtype) -> int:
    """Query vectors per tile, for at most num_queries."""
    return min(MAX_QUERIES_FLOAT32 if dtype == torch.float32 else most, padded(num_queries))


def key_tile(block_dim: int, dtype: torch.dtype) -> int:
    """Keys per tile: 16 KiB of K in the dtype of the product, at least 16 and at most 128. dtype: of the queries."""
    return max(16, min(128, 16384 // (block_dim * dtype.itemsize)))


def sinks_or(sinks: Tensor | None, unused: Tensor) -> Tensor:
    """The sinks, or any tensor as a pointer that the kernel does not read."""
    return unused if sinks is None else sinks.contiguous()


@triton.jit
def first_state(sinks, head, has_sink, HAS_SINKS: tl.constexpr, BLOCK: tl.constexpr):
    """(maximum, total) of query vectors before their first key: float32 [BLOCK].

    A sink is a logit without a value; has_sink: the query vectors that it joins.
    """
    maximum = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=has_sink, other=0.0).to(tl.float32) * LOG2_E
        maximum = tl.where(has_sink, sink, maximum)
        total = tl.where(has_sink, 1.0, total)
    return maximum, total


@triton.jit
def attend_keys(
    output,
    maximum,
    total,
    q,
    position,
    k_cache,
    v_cache,
    blocks,
    begin,
    end,
    first_key,
    end_key,
    stride_block,
    inner_scale,
    scale,
    sliding_window,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One pass of online softmax over the key tiles from begin, a multiple of KEYS, to end.

    output: float32 [BLOCK, BLOCK_DIM], maximum (base 2), total: float32 [BLOCK]; returned updated.
    q: [BLOCK, BLOCK_DIM]; position: int32 [BLOCK]. k_cache, v_cache: at the kv head, widened to q's dtype if they are
    float8; blocks: the sequence's block table.
    MASKED: some queries may not see all keys of the tiles; keys outside first_key .. end_key are then not read.
    """
    dim = tl.arange(0, BLOCK_DIM)
    for tile in range(begin, end, KEYS):
        key = tile + tl.arange(0, KEYS)
        if MASKED:
            present = (key >= first_key) & (key < end_key)
            block = tl.load(blocks + key // BLOCK_SIZE, mask=present, other=0)
        else:
            present = key >= 0
            block = tl.load(blocks + key // BLOCK_SIZE)
        row = block.to(tl.int64) * stride_block + (key % BLOCK_SIZE) * HEAD_DIM
        offset = row[:, None] + dim[None, :]
        k = _load_rows(k_cache + offset, present, dim, MASKED, HEAD_DIM, BLOCK_DIM).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if HAS_SOFTCAP:
            scores = 1.0 - 2.0 / (tl.exp2(scores * inner_scale) + 1.0)
        if MASKED:
            visible = (key[None, :] <= position[:, None]) & present[None, :]
            if HAS_WINDOW:
                visible = visible & (key[None, :] > position[:, None] - sliding_window)
            scores = tl.where(visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale)
        shift = new_maximum
        if MASKED:
            # With a window, a row may see none of the first keys that others see: -inf - -inf would be NaN.
            shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores * scale - shift[:, None])
        fade = tl.exp2(maximum - shift)
        total = total * fade + tl.sum(weights, 1)
        v = _load_rows(v_cache + offset, present, dim, MASKED, HEAD_DIM, BLOCK_DIM).to(q.dtype)
        output = tl.dot(weights.to(v.dtype), v, output * fade[:, None], input_precision="ieee")
        maximum = new_maximum
    return output, maximum, total


@triton.jit
def _load_rows(
    pointers, present, dim, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr
):  # unmasked loads if possible: the compiler cannot always remove a mask that is true
    if MASKED:
        if HEAD_DIM == BLOCK_DIM:
            return tl.load(pointers, mask=present[:, None], other=0.0)
        else:
            return tl.load(pointers, mask=present[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    else:
        if HEAD_DIM == BLOCK_DIM:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=(dim < HEAD_DIM)[None, :], other=0.0)
