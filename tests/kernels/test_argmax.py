import math

import pytest
import torch
from loraserve_kernels.backend import Backend


def as_python(logits: torch.Tensor, num_columns: int) -> tuple[list[int], list[bool]]:
    indices, are_finite = [], []
    for row in logits[:, :num_columns].double().tolist():
        nans = [i for i, value in enumerate(row) if math.isnan(value)]
        index = nans[0] if nans else row.index(max(row))
        indices.append(index)
        are_finite.append(math.isfinite(row[index]))
    return indices, are_finite


@pytest.mark.parametrize(("num_rows", "num_columns"), [(0, 3), (1, 1), (3, 15), (5, 513), (16, 16_000), (40, 14_001)])
def test_returns_the_first_index_of_the_largest_logit(
    backend: Backend, dtype: torch.dtype, num_rows: int, num_columns: int, device: str
) -> None:
    """Logits are rounded so that ties are common; values after the last column are larger."""
    generator = torch.Generator().manual_seed(num_columns)
    logits = torch.randn(num_rows, num_columns + 9, generator=generator).mul(2).round().to(dtype)
    logits[:, num_columns:] = 100
    for rows, count in ((logits, num_columns), (logits[:, 2:], max(num_columns - 2, 1))):
        assert backend.argmax(rows.to(device), count) == as_python(rows, count)


@pytest.mark.parametrize("place", [0, 7, 600, 1023, 1030])
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf])
def test_rows_that_are_not_finite_are_flagged(
    backend: Backend, dtype: torch.dtype, place: int, value: float, device: str
) -> None:
    logits = torch.full((3, 1031), -2.0, dtype=dtype)
    logits[1, place] = value
    logits[1, 1030] = value
    assert backend.argmax(logits.to(device), 1031) == ([0, place, 0], [True, False, True])


def test_minus_infinity_is_below_any_number_and_a_row_of_it_is_not_finite(
    backend: Backend, dtype: torch.dtype, device: str
) -> None:
    logits = torch.full((2, 700), -math.inf, dtype=dtype)
    logits[0, 650] = -3.0
    assert backend.argmax(logits.to(device), 700) == ([650, 0], [True, False])


def test_refuses_more_columns_than_the_logits_have(backend: Backend) -> None:
    with pytest.raises(ValueError, match="logits is"):
        backend.argmax(torch.zeros(2, 5), 6)
