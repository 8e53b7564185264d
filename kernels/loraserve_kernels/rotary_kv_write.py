"""Rotate the step's queries and keys by their positions, and store keys and values in their cache slots."""

from dataclasses import dataclass

import torch
from torch import Tensor

from loraserve_kernels.checks import mismatch, require_dense_last, require_like
from loraserve_kernels.kv_float8 import KV_FLOAT8
from loraserve_kernels.kv_write import KvWriteInputs, check_kv_write, kv_write_reference, make_kv_write_inputs


def check_rotary_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Raise `ValueError` unless shapes, dtypes and devices are those of `Backend.rotary_kv_write`."""
    check_kv_write(k, v, k_cache, v_cache, slot_mapping)
    num_rows, head_dim = k.shape[0], k.shape[2]
    if q.dim() != 3 or q.shape[0] != num_rows or q.shape[2] != head_dim:
        raise mismatch("q", list(q.shape), f"[T, num_heads, head_dim] = [{num_rows}, num_heads, {head_dim}]")
    require_like("q", q, "k", k)
    require_dense_last("q", q)
    for name, factor in (("cos", cos), ("sin", sin)):
        if factor.dim() != 2 or factor.shape[0] != num_rows or factor.shape[1] % 2 or factor.shape[1] > head_dim:
            raise mismatch(name, list(factor.shape), f"[{num_rows}, an even rotary_dim of at most {head_dim}]")
        require_like(name, factor, "k", k)
        if not factor.is_contiguous():
            raise mismatch(name, "strided", "dense")
    if cos.shape != sin.shape:
        raise mismatch("sin", list(sin.shape), f"{list(cos.shape)}, as cos")


def rotary_kv_write_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """`Backend.rotary_kv_write` in plain torch (Su et al., 2021, in the half-split layout of GPT-NeoX)."""
    q.copy_(_rotated(q, cos, sin, q.dtype))
    k_dtype = torch.float32 if k_cache.dtype == KV_FLOAT8 else k.dtype  # rounded once
    kv_write_reference(_rotated(k, cos, sin, k_dtype), v, k_cache, v_cache, slot_mapping)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    rotary_dim = cos.shape[1]
    turned, rest = x[..., :rotary_dim].float(), x[..., rotary_dim:]
    low, high = turned.chunk(2, dim=-1)
    cos, sin = cos.float()[:, None], sin.float()[:, None]
    turned = turned * cos + torch.cat([-high, low], dim=-1) * sin
    return torch.cat([turned.to(dtype), rest.to(dtype)], dim=-1)


@dataclass(slots=True)
class RotaryInputs:
    """Arguments of one `rotary_kv_write` call."""

    q: Tensor
    cos: Tensor
    sin: Tensor
    kv: KvWriteInputs


def make_rotary_inputs(
    num_rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    kv_dtype: torch.dtype | None = None,
) -> RotaryInputs:
    """Random angles; like k and v, q is a slice of a wider output. kv_dtype: of the caches; None = dtype."""
    generator = torch.Generator().manual_seed(seed + 1)
    angles = torch.rand(num_rows, rotary_dim // 2, generator=generator) * 6
    angles = torch.cat([angles, angles], dim=-1)
    return RotaryInputs(
        q=torch.randn(num_rows, num_heads + 1, head_dim, generator=generator).to(device, dtype)[:, :num_heads],
        cos=angles.cos().to(device, dtype),
        sin=angles.sin().to(device, dtype),
        kv=make_kv_write_inputs(
            num_rows, num_kv_heads, head_dim, dtype=dtype, device=device, seed=seed, kv_dtype=kv_dtype
        ),
    )
