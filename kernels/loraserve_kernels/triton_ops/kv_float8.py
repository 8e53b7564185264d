"""Rounding of values for kernels that write to a cache."""

import triton
import triton.language as tl

from loraserve_kernels.kv_float8 import KV_FLOAT8_MAX

_MAX = tl.constexpr(KV_FLOAT8_MAX)


@triton.jit
def kept(x, cache):
    """x in the dtype that cache points to, as by `to_kv_float8` if that is e4m3; no instruction if x already has it."""
    dtype = cache.dtype.element_ty
    if dtype == tl.float8e4nv:
        x = x.to(tl.float32)
        x = tl.where(tl.abs(x) == float("inf"), float("nan"), x)
        x = tl.where(x > _MAX, _MAX, tl.where(x < -_MAX, -_MAX, x))
    return x.to(dtype)
