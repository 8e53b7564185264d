"""Causal attention over the paged KV cache on a GPU, with decode and prefill rows mixed."""

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from loraserve_kernels.attention_work import APPEND_ROWS, AttentionWork, make_attention_work, splits_for_device
from loraserve_kernels.backend import KernelTooLargeError
from loraserve_kernels.checks import mismatch, require_dense
from loraserve_kernels.paged_attention import check_paged_attention
from loraserve_kernels.step_batch import StepBatch
from loraserve_kernels.triton_ops.attention_tile import Scores
from loraserve_kernels.triton_ops.paged_decode import paged_decode
from loraserve_kernels.triton_ops.paged_prefill import paged_prefill


def paged_attention(
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
    """`Backend.paged_attention`, for scaling above 0. Rows that belong to no sequence are left undefined.

    With `batch.attention`, nothing is read on the host and launches depend on shapes alone, so they can be captured in
    a CUDA graph. Without it, the lists are built here.
    """
    check_paged_attention(q, k_cache, v_cache, batch, sliding_window, softcap, sinks)
    if scaling <= 0:
        raise mismatch("scaling", scaling, "above 0")
    work = batch.attention
    if work is None:
        num_splits = splits_for_device(q.device, k_cache.shape[1])
        work = make_attention_work(batch.context_lens, batch.num_rows, num_splits)
    _check_work(work, q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    shared = (out, q, k_cache, v_cache, batch)
    scores = Scores(scaling, softcap)
    options = {"scores": scores, "sliding_window": sliding_window, "sinks": sinks}
    try:
        paged_decode(*shared, work.decode_splits, 1, **options)
        paged_decode(*shared, work.append_splits, APPEND_ROWS, **options)
        paged_prefill(*shared, work.prefill_tiles, **options)
    except OutOfResources as error:
        dtype = str(q.dtype).removeprefix("torch.")
        raise KernelTooLargeError(
            f"attention with heads of {q.shape[2]} in {dtype} does not fit {q.device} "
            f"({error.name}: {error.required}, at most {error.limit})"
        ) from error
    return out


def _check_work(work: AttentionWork, q: Tensor) -> None:
    for name, num_columns in (("decode_splits", 4), ("append_splits", 4), ("prefill_tiles", 3)):
        entries: Tensor = getattr(work, name)
        require_dense(f"attention.{name}", entries, torch.int32)
        if entries.dim() != 2 or entries.shape[1] != num_columns:
            raise mismatch(f"attention.{name}", list(entries.shape), f"[number of entries, {num_columns}]")
        if entries.device != q.device:
            raise mismatch(f"attention.{name}.device", entries.device, f"{q.device}, as q")
