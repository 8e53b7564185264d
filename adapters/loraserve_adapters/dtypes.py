"""Float formats as numpy sees them. bfloat16 has no numpy type, so its bits travel as uint16."""

import numpy as np

STORAGE = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2"), "bfloat16": np.dtype("<u2")}
"""By the name of a base model's dtype: what packed bytes are read as."""

FROM_SAFETENSORS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def raw_bytes(values: np.ndarray) -> memoryview:
    """The bytes in row-major order, as hashes and files take them; no copy if `values` is contiguous."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def all_finite(values: np.ndarray, dtype: str) -> bool:
    if dtype == "bfloat16":
        return values.size == 0 or int((values & 0x7FFF).max()) < 0x7F80
    return bool(np.isfinite(values).all())


def convert(values: np.ndarray, source: str, target: str) -> np.ndarray:
    """Finite values from one format to another, rounded to nearest even. Too large a value becomes infinite.

    values: any shape, of `STORAGE[source]`; the result has `STORAGE[target]` and may be `values` itself.
    """
    if source == target:
        return values
    if source == "bfloat16":
        wide = (values.astype(np.uint32) << 16).view(np.float32)
    else:
        wide = values.astype(np.float32, copy=False)
    if target == "bfloat16":
        return _round_to_bfloat16(wide)
    with np.errstate(over="ignore"):
        return wide.astype(STORAGE[target], copy=False)


def _round_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 → bfloat16 bits. Adds just under half of the last kept bit, or half if that bit is odd."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    odd = (bits >> 16) & 1
    odd += 0x7FFF
    odd += bits
    odd >>= 16
    return odd.astype(np.uint16)
