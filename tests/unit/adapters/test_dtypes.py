import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from loraserve_adapters.dtypes import STORAGE, all_finite, convert

TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def bits_by_torch(values: np.ndarray, source: str, target: str) -> np.ndarray:
    tensor = torch.from_numpy(values.copy().view(np.int16 if source == "bfloat16" else values.dtype))
    tensor = tensor.view(TORCH[source]).to(TORCH[target])
    width = torch.int32 if target == "float32" else torch.int16
    return tensor.view(width).numpy()


@pytest.mark.parametrize("source", STORAGE)
@pytest.mark.parametrize("target", STORAGE)
def test_converts_every_16_bit_pattern_and_many_others_as_torch_does(source: str, target: str) -> None:
    if source == "float32":
        values = np.random.default_rng(0).integers(0, 2**32, 200_000, np.uint32).view(np.float32)
    else:
        values = np.arange(2**16, dtype=np.uint16).view(STORAGE[source])
    finite = np.array([all_finite(value, source) for value in values.reshape(-1, 1)]) if source == "bfloat16" else None
    values = values[np.isfinite(values) if finite is None else finite]
    converted = convert(values, source, target)
    assert converted.dtype == STORAGE[target]
    assert np.array_equal(converted.view(f"i{converted.itemsize}"), bits_by_torch(values, source, target))


@settings(max_examples=200, deadline=None)
@given(hnp.arrays(np.float32, 8, elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_rounds_float32_to_bfloat16_as_torch_does(values: np.ndarray) -> None:
    converted = convert(values, "float32", "bfloat16")
    assert np.array_equal(converted.view(np.int16), bits_by_torch(values, "float32", "bfloat16"))


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_finds_values_that_are_not_finite(dtype: str, bad: float) -> None:
    values = np.array([1.0, bad, -2.0], np.float32)
    stored = (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else values.astype(STORAGE[dtype])
    assert not all_finite(stored, dtype)
    assert all_finite(stored[::2], dtype)


def test_values_too_large_become_infinite_without_a_warning() -> None:
    values = np.array([1e5, 3.4e38], np.float32)
    assert not all_finite(convert(values[:1], "float32", "float16"), "float16")
    assert not all_finite(convert(values[1:], "float32", "bfloat16"), "bfloat16")
    assert all_finite(convert(values[:1], "float32", "bfloat16"), "bfloat16")
