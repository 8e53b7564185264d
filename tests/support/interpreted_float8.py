"""Converts e4m3 as GPUs do, for Triton's interpreter, whose own conversion loses carries, ties and NaN."""

import numpy as np
import pytest
import torch
from loraserve_kernels.kv_float8 import KV_FLOAT8_MAX

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integer dtype by bytes per element."""


def convert_as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values beyond e4m3's range become NaN, to show that a kernel lacks its clamp; GPUs and newer torch clamp them."""
    import triton.language as tl
    from triton.runtime import interpreter

    dtypes = {
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float32: torch.float32,
    }
    original = interpreter._convert_float

    def convert(values: np.ndarray, from_dtype: tl.dtype, to_dtype: tl.dtype, rounding_mode: object) -> np.ndarray:
        if tl.float8e4nv not in (from_dtype, to_dtype):
            return original(values, from_dtype, to_dtype, rounding_mode)
        converted = torch.from_numpy(np.array(values)).view(dtypes[from_dtype])
        if to_dtype == tl.float8e4nv:
            converted = converted.masked_fill(converted.abs() > KV_FLOAT8_MAX, float("nan"))
        converted = converted.to(dtypes[to_dtype])
        return converted.view(BITS[converted.itemsize]).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)
