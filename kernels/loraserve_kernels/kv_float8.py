"""KV caches of one byte an element: what they keep of a value, and why without a scale.

With 3 bits of mantissa, the nearest value of e4m3 is within 1/16 of any from 2^-6 to 448, its largest. A scale would
move that range and gain nothing within it, so there is none, as vLLM has none unless a checkpoint brings one. Keys or
values beyond 448, as large biases make them, are clamped.
"""

import torch
from torch import Tensor

from loraserve_kernels.checks import mismatch

KV_FLOAT8 = torch.float8_e4m3fn
KV_FLOAT8_MAX = 448.0


def to_kv_float8(x: Tensor) -> Tensor:
    """The nearest values that e4m3 has, ties to even; beyond ±448 that limit.

    NaN stays, and an infinity, which e4m3 lacks, becomes one: a row that is broken must be found, not clamped.
    """
    x = x.float()
    clamped = x.clamp(-KV_FLOAT8_MAX, KV_FLOAT8_MAX)  # some versions of torch make NaN of what lies beyond
    return clamped.masked_fill(x.isinf(), float("nan")).to(KV_FLOAT8)


def indexable(cache: Tensor) -> Tensor:
    """The cache itself, or the bytes of a float8 one: few devices read and write elements of float8 by index."""
    return cache.view(torch.uint8) if cache.dtype == KV_FLOAT8 else cache


def require_cacheable(name: str, rows: Tensor, cache: Tensor) -> None:
    """Require the caches' device, and their dtype unless that is `KV_FLOAT8`, to which rows of any are rounded."""
    if rows.dtype != cache.dtype and cache.dtype != KV_FLOAT8:
        raise mismatch(f"{name}.dtype", rows.dtype, f"{cache.dtype}, as the caches")
    if rows.device != cache.device:
        raise mismatch(f"{name}.device", rows.device, f"{cache.device}, as the caches")
