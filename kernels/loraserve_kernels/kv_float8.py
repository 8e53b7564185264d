"""KV caches with one byte per element: how values are rounded, and why there is no scale.

With 3 bits of mantissa, e4m3 represents any value from 2^-6 to 448, its largest, within 1/16 of it. A scale would only
move that range without gaining precision, so there is none; vLLM has none either unless a checkpoint contains one. Keys
or values above 448, which large biases can cause, are clamped.
"""

import torch
from torch import Tensor

from loraserve_kernels.checks import mismatch

KV_FLOAT8 = torch.float8_e4m3fn
KV_FLOAT8_MAX = 448.0


def to_kv_float8(x: Tensor) -> Tensor:
    """Rounded to the nearest e4m3 value, ties to even, and clamped to ±448.

    NaN stays NaN, and an infinity, which e4m3 lacks, becomes NaN: a broken row must be detected, not clamped.
    """
    x = x.float()
    clamped = x.clamp(-KV_FLOAT8_MAX, KV_FLOAT8_MAX)  # some versions of torch convert larger values to NaN
    return clamped.masked_fill(x.isinf(), float("nan")).to(KV_FLOAT8)


def indexable(cache: Tensor) -> Tensor:
    """The cache itself, or a float8 cache's bytes: few devices can index float8 elements."""
    return cache.view(torch.uint8) if cache.dtype == KV_FLOAT8 else cache


def require_cacheable(name: str, rows: Tensor, cache: Tensor) -> None:
    """Require the caches' device, and their dtype unless it is `KV_FLOAT8`, to which rows of any dtype are rounded."""
    if rows.dtype != cache.dtype and cache.dtype != KV_FLOAT8:
        raise mismatch(f"{name}.dtype", rows.dtype, f"{cache.dtype}, as the caches")
    if rows.device != cache.device:
        raise mismatch(f"{name}.device", rows.device, f"{cache.device}, as the caches")
