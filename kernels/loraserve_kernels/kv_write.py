"""Store the step's K and V rows in their cache slots."""

from dataclasses import dataclass

import torch
from torch import Tensor

from loraserve_kernels.checks import mismatch, require_dense, require_dense_last, require_like
from loraserve_kernels.kv_float8 import KV_FLOAT8, indexable, require_cacheable, to_kv_float8


def check_kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Raise `ValueError` unless shapes, dtypes and devices are those of `Backend.kv_write`."""
    expected = (slot_mapping.shape[0], k_cache.shape[1], k_cache.shape[3])
    if k.shape != expected:
        raise mismatch("k", list(k.shape), f"[T, num_kv_heads, head_dim] = {list(expected)}")
    if v.shape != expected:
        raise mismatch("v", list(v.shape), f"[T, num_kv_heads, head_dim] = {list(expected)}")
    check_caches(k_cache, v_cache)
    require_cacheable("k", k, k_cache)
    require_like("v", v, "k", k)
    require_dense("slot_mapping", slot_mapping, torch.int64)
    require_dense_last("k", k)
    require_dense_last("v", v)


def check_caches(k_cache: Tensor, v_cache: Tensor) -> None:
    """Require two dense caches of one shape, dtype and device."""
    if k_cache.shape != v_cache.shape:
        raise mismatch("v_cache", list(v_cache.shape), f"{list(k_cache.shape)}, as k_cache")
    require_like("v_cache", v_cache, "k_cache", k_cache)
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise mismatch("k_cache or v_cache", "strided", "dense")


def kv_write_reference(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """`Backend.kv_write` in plain torch."""
    block_size = k_cache.shape[2]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    for rows, cache in ((k, k_cache), (v, v_cache)):
        stored = to_kv_float8(rows) if cache.dtype == KV_FLOAT8 else rows
        indexable(cache)[block, :, offset] = indexable(stored)


@dataclass(slots=True)
class KvWriteInputs:
    """Arguments of one `kv_write` call."""

    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slot_mapping: Tensor


def make_kv_write_inputs(
    num_rows: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    kv_dtype: torch.dtype | None = None,
) -> KvWriteInputs:
    """Random rows for distinct random slots of NaN caches; k and v are slices of one fused output.

    kv_dtype: of the caches; None = dtype.
    """
    generator = torch.Generator().manual_seed(seed)
    num_blocks = num_rows // block_size + 3
    fused = torch.randn(num_rows, 2 * num_kv_heads, head_dim, generator=generator).to(device, dtype)
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    return KvWriteInputs(
        k=fused[:, :num_kv_heads],
        v=fused[:, num_kv_heads:],
        k_cache=torch.full(shape, float("nan"), device=device).to(kv_dtype or dtype),
        v_cache=torch.full(shape, float("nan"), device=device).to(kv_dtype or dtype),
        slot_mapping=torch.randperm(num_blocks * block_size, generator=generator)[:num_rows].to(device),
    )
