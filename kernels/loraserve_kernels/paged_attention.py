"""Causal attention over a paged KV cache, with prefill chunks and decode rows mixed in one `StepBatch`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from loraserve_kernels.checks import mismatch, require_dense, require_dense_last
from loraserve_kernels.kv_float8 import indexable, require_cacheable
from loraserve_kernels.kv_write import check_caches
from loraserve_kernels.step_batch import Segments, StepBatch


def check_paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: StepBatch,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Raise `ValueError` unless shapes, dtypes, devices and options are those of `Backend.paged_attention`."""
    check_caches(k_cache, v_cache)
    num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    if q.dim() != 3 or q.shape[2] != head_dim or q.shape[1] % num_kv_heads != 0:
        raise mismatch("q", list(q.shape), f"[T, a multiple of {num_kv_heads} heads, {head_dim}]")
    require_cacheable("q", q, k_cache)
    require_dense_last("q", q)
    if sliding_window is not None and sliding_window < 1:
        raise mismatch("sliding_window", sliding_window, "None or at least 1")
    if softcap is not None and softcap <= 0:
        raise mismatch("softcap", softcap, "None or above 0")
    if sinks is not None and (sinks.dim() != 1 or sinks.shape[0] != q.shape[1]):
        raise mismatch("sinks", list(sinks.shape), f"[num_heads] = [{q.shape[1]}]")
    check_sequences(batch)


def check_sequences(batch: StepBatch) -> None:
    """Raise `ValueError` unless the batch's tensors per sequence have `StepBatch`'s shapes and dtypes."""
    table = batch.block_table
    if table.dim() != 2 or table.dtype != torch.int32:
        raise mismatch("block_table", f"{list(table.shape)} {table.dtype}", "[S, max_blocks] int32")
    require_dense_last("block_table", table)
    num_sequences = table.shape[0]
    for name, tensor in (
        ("context_lens", batch.context_lens),
        ("row_start", batch.row_start),
        ("num_rows", batch.num_rows),
    ):
        require_dense(name, tensor, torch.int32)
        if tensor.shape != (num_sequences,):
            raise mismatch(name, list(tensor.shape), f"[{num_sequences}], as block_table")


def paged_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: StepBatch,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`Backend.paged_attention` in plain torch: gathers each sequence's visible K and V, then a masked softmax.

    In float32, or in float64 if q has that dtype.
    """
    precision = torch.promote_types(q.dtype, torch.float32)
    num_kv_heads, block_size = k_cache.shape[1], k_cache.shape[2]
    group = q.shape[1] // num_kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    sequences = zip(batch.context_lens.tolist(), batch.row_start.tolist(), batch.num_rows.tolist(), strict=True)
    for sequence, (context_len, first_row, num_rows) in enumerate(sequences):
        if num_rows == 0:
            continue
        rows = slice(first_row, first_row + num_rows)
        first_key = 0 if sliding_window is None else max(0, context_len - num_rows - sliding_window + 1)
        key = torch.arange(first_key, context_len, device=q.device)
        block = batch.block_table[sequence, key // block_size].long()
        k, v = (  # [keys, num_kv_heads, head_dim]
            indexable(cache)[block, :, key % block_size].view(cache.dtype).to(precision) for cache in (k_cache, v_cache)
        )
        queries = q[rows].to(precision).unflatten(1, (num_kv_heads, group))
        scores = torch.einsum("rhgd,khd->hgrk", queries, k) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        position = torch.arange(context_len - num_rows, context_len, device=q.device)[:, None]
        hidden = key > position
        if sliding_window is not None:
            hidden |= key <= position - sliding_window
        scores.masked_fill_(hidden, float("-inf"))
        if sinks is not None:
            logits = sinks.to(precision).view(num_kv_heads, group, 1, 1).expand(-1, -1, num_rows, 1)
            weights = torch.cat([scores, logits], dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        out[rows] = torch.einsum("hgrk,khd->rhgd", weights, v).flatten(1, 2).to(q.dtype)
    return out


@dataclass(slots=True)
class AttentionInputs:
    """Arguments of one `paged_attention` call, and the K and V of each sequence without paging."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    batch: StepBatch
    keys: list[Tensor]
    """Per sequence [context_len, num_kv_heads, head_dim], with the caches' values in q's dtype."""
    values: list[Tensor]


def make_attention_inputs(
    context_lens: list[int],
    num_rows: list[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    kv_dtype: torch.dtype | None = None,
) -> AttentionInputs:
    """Random inputs: blocks in random order, NaN in unused cache slots, invalid block ids past each block table's end.

    q is a slice of a fused output, so its rows are strided. The sequences' rows are in reverse sequence order.
    kv_dtype: of the caches; None = dtype.
    """
    kv_dtype = kv_dtype or dtype
    generator = torch.Generator().manual_seed(seed)
    used = [-(-context // block_size) for context in context_lens]
    num_blocks = sum(used) + 2
    order = torch.randperm(num_blocks, generator=generator).tolist()
    block_table = torch.full((len(context_lens), max([*used, 0]) + 3), 1 << 30, dtype=torch.int32)
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    k_cache, v_cache = torch.full(shape, float("nan"), dtype=dtype), torch.full(shape, float("nan"), dtype=dtype)
    keys, values, slots = [], [], []
    for sequence, (context, count) in enumerate(zip(context_lens, num_rows, strict=True)):
        blocks = torch.tensor([order.pop() for _ in range(used[sequence])], dtype=torch.int64)
        block_table[sequence, : len(blocks)] = blocks
        position = torch.arange(context)
        k, v = torch.randn(2, context, num_kv_heads, head_dim, generator=generator).to(kv_dtype).to(dtype)
        k_cache[blocks[position // block_size], :, position % block_size] = k
        v_cache[blocks[position // block_size], :, position % block_size] = v
        keys.append(k.to(device))
        values.append(v.to(device))
        new = position[context - count :]
        slots.append(blocks[new // block_size] * block_size + new % block_size)
    total = sum(num_rows)
    row_start = [total - sum(num_rows[: sequence + 1]) for sequence in range(len(num_rows))]
    fused = torch.randn(total, num_heads + 2 * num_kv_heads, head_dim, generator=generator)
    int32 = {"dtype": torch.int32, "device": device}
    segments = Segments(torch.tensor([0, total], **int32), torch.tensor([-1], **int32), has_adapter=False)
    batch = StepBatch(
        token_ids=torch.zeros(total, dtype=torch.int64, device=device),
        positions=torch.cat([torch.arange(c - n, c) for c, n in zip(context_lens, num_rows, strict=True)][::-1]).to(
            device
        ),
        slot_mapping=torch.cat(slots[::-1]).to(device),
        block_table=block_table.to(device),
        context_lens=torch.tensor(context_lens, **int32),
        row_start=torch.tensor(row_start, **int32),
        num_rows=torch.tensor(num_rows, **int32),
        segments=segments,
        sampled_rows=torch.zeros(0, dtype=torch.int64, device=device),
        sampled_segments=segments,
    )
    q = fused.to(device, dtype)[:, :num_heads]
    return AttentionInputs(q, k_cache.to(device, kv_dtype), v_cache.to(device, kv_dtype), batch, keys, values)
