"""Arguments and floors of the GPU attention benchmarks: bfloat16, KV blocks of 16 in random order."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from gpu.kernel_bench import Case
from gpu.timing import Call
from loraserve_kernels.attention_work import PROGRAMS_PER_SM, make_attention_work, splits_for_device
from loraserve_kernels.step_batch import Segments, StepBatch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

BLOCK_SIZE = 16
DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Workload:
    """Sequences with `context_lens` tokens in the cache, of which the last `num_rows` are computed."""

    name: str
    context_lens: list[int]
    num_rows: list[int]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    sliding_window: int | None = None
    softcap: float | None = None
    kv_dtype: torch.dtype = DTYPE

    @property
    def visible_keys(self) -> int:
        """Keys that some row of their sequence sees, over all sequences."""
        return sum(
            min(context, rows - 1 + (self.sliding_window or context))
            for context, rows in zip(self.context_lens, self.num_rows, strict=True)
        )

    @property
    def num_scores(self) -> int:
        """Pairs of a row and a key it sees."""
        return sum(
            min(position + 1, self.sliding_window or context)
            for context, rows in zip(self.context_lens, self.num_rows, strict=True)
            for position in range(context - rows, context)
        )

    @property
    def size_bytes(self) -> int:
        """K and V of the visible keys, q and the result, and the block table."""
        key_bytes = 2 * self.kv_dtype.itemsize * self.num_kv_heads * self.head_dim
        row_bytes = 2 * 2 * self.num_heads * self.head_dim
        return self.visible_keys * key_bytes + sum(self.num_rows) * row_bytes + 4 * self.visible_keys // BLOCK_SIZE

    @property
    def flops(self) -> float:
        return 4.0 * self.num_scores * self.num_heads * self.head_dim


def paged_case(workload: Workload, arm: str = "ours", programs_per_sm: int = PROGRAMS_PER_SM) -> Case:
    return Case(workload.name, arm, _paged(workload, programs_per_sm), workload.size_bytes, workload.flops)


def dense_case(workload: Workload) -> Case:
    """torch's own attention over a dense cache, for sequences of equal length that all decode or all lack a prefix."""
    return Case(workload.name, "torch dense", _dense(workload), workload.size_bytes, workload.flops)


def make_batch(workload: Workload, device: str, seed: int) -> tuple[StepBatch, int]:
    """A batch without its attention work, and the number of blocks its tables refer to."""
    used = [-(-context // BLOCK_SIZE) for context in workload.context_lens]
    order = torch.randperm(sum(used), generator=torch.Generator().manual_seed(seed)).int()
    block_table = torch.zeros(len(used), max(used), dtype=torch.int32)
    for row, blocks in zip(block_table, order.split(used), strict=True):
        row[: len(blocks)] = blocks
    rows = torch.tensor(workload.num_rows, dtype=torch.int32)
    total = int(rows.sum())
    nothing = torch.zeros(total, dtype=torch.int64, device=device)  # attention reads neither tokens nor slots
    start = torch.tensor([0, total], dtype=torch.int32, device=device)
    segments = Segments(start, torch.tensor([-1], dtype=torch.int32, device=device), has_adapter=False)
    batch = StepBatch(
        token_ids=nothing,
        positions=nothing,
        slot_mapping=nothing,
        block_table=block_table.to(device),
        context_lens=torch.tensor(workload.context_lens, dtype=torch.int32, device=device),
        row_start=(rows.cumsum(0, dtype=torch.int32) - rows).to(device),
        num_rows=rows.to(device),
        segments=segments,
        sampled_rows=nothing,
        sampled_segments=segments,
    )
    return batch, sum(used)


def _paged(workload: Workload, programs_per_sm: int, device: str = "cuda") -> Callable[[int], Call]:
    def make(seed: int) -> Call:
        from loraserve_kernels.triton_ops.paged_attention import paged_attention

        batch, num_blocks = make_batch(workload, device, seed)
        num_splits = splits_for_device(torch.device(device), workload.num_kv_heads) * programs_per_sm // PROGRAMS_PER_SM
        batch = replace(batch, attention=make_attention_work(batch.context_lens, batch.num_rows, num_splits))
        q = _random(device, sum(workload.num_rows), workload.num_heads, workload.head_dim)
        cache_shape = (num_blocks, workload.num_kv_heads, BLOCK_SIZE, workload.head_dim)
        k, v = (_random(device, *cache_shape).to(workload.kv_dtype) for _ in range(2))
        scaling, window, softcap = workload.head_dim**-0.5, workload.sliding_window, workload.softcap
        return lambda: paged_attention(q, k, v, batch, scaling=scaling, sliding_window=window, softcap=softcap)

    return make


def _dense(workload: Workload, device: str = "cuda") -> Callable[[int], Call]:
    def make(seed: int) -> Call:
        num_seqs, context, rows = len(workload.context_lens), workload.context_lens[0], workload.num_rows[0]
        q = _random(device, num_seqs, workload.num_heads, rows, workload.head_dim)
        k, v = (_random(device, num_seqs, workload.num_kv_heads, context, workload.head_dim) for _ in range(2))
        return lambda: scaled_dot_product_attention(q, k, v, is_causal=rows > 1, enable_gqa=True)

    return make


def _random(device: str, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=DTYPE, device=device)
