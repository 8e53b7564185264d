"""Drawing in C against `sample_reference`, which sorts whole rows and sums in float64."""

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from loraserve_kernels.cpu_backend import CpuBackend
from loraserve_kernels.draw import Draw
from loraserve_kernels.host_sampling import SamplesOnHost
from loraserve_kernels.sampling import make_logits, pack_draws, sample_reference
from torch import Tensor

NUM_ROWS = 24
CHOICES = [  # top_k, top_p, min_p
    *product([0, 1, 40, 3000], [1.0, 0.9, 0.05], [0.0]),
    *product([0, 40], [1.0, 0.95], [0.02, 1.0]),
    (0, 0.9999, 0.0),
    (0, 1e-9, 0.0),
]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def draws_of(num_rows: int, temperature: float, top_k: int, top_p: float, min_p: float) -> list[Draw]:
    return [Draw(row, temperature, top_k, top_p, min_p, 7 * row - 3, 1000 - row) for row in range(num_rows)]


def expected_of(logits: Tensor, num_columns: int, draws: Sequence[Draw]) -> list[int]:
    packed = pack_draws(
        [draw.temperature for draw in draws],
        [draw.top_k for draw in draws],
        [draw.top_p for draw in draws],
        [draw.min_p for draw in draws],
        [draw.seed for draw in draws],
        [draw.position for draw in draws],
    )
    return sample_reference(logits[[draw.row for draw in draws]], num_columns, packed, None)[0].tolist()


@pytest.mark.parametrize(("num_columns", "num_likely"), [(1, 1), (50, 50), (2500, 40), (2500, 2500), (16_001, 16_001)])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_drawn_tokens_equal_those_of_the_reference(
    cpu: CpuBackend, dtype: torch.dtype, num_columns: int, num_likely: int, temperature: float
) -> None:
    """Values after the last column are larger than all others."""
    logits = torch.cat([make_logits(NUM_ROWS, num_columns, num_likely), torch.full((NUM_ROWS, 5), 99.0)], 1).to(dtype)
    for choice in CHOICES:
        draws = draws_of(NUM_ROWS, temperature, *choice)
        assert cpu.draw(logits, num_columns, draws) == expected_of(logits, num_columns, draws), choice


@pytest.mark.parametrize("choice", [(0, 1.0, 0.0), (0, 0.5, 0.0), (300, 1.0, 0.0), (300, 0.5, 0.0)], ids=str)
def test_equal_logits_are_ordered_by_ascending_id(
    cpu: CpuBackend, dtype: torch.dtype, choice: tuple[int, float, float]
) -> None:
    logits = torch.zeros(200, 1000, dtype=dtype)
    logits[::2] *= -1  # minus zero is zero
    draws = draws_of(200, 0.7, *choice)
    chosen = cpu.draw(logits, 1000, draws)
    assert chosen == expected_of(logits, 1000, draws)
    top_k, top_p, _ = choice
    assert max(chosen) < (top_k or 1000) * top_p


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_tokens_without_probability_are_never_drawn(
    cpu: CpuBackend, dtype: torch.dtype, choice: tuple[int, float, float]
) -> None:
    """With 4,000 random numbers, so that some are close to either end."""
    logits = torch.full((1, 700), -torch.inf, dtype=dtype)
    logits[:, 100:103] = torch.tensor([1.0, 3.0, 2.0])
    draws = [Draw(0, 1.0, *choice, seed=1, position=position) for position in range(4000)]
    assert set(cpu.draw(logits, 700, draws)) <= {100, 101, 102}


def test_a_tiny_temperature_draws_the_best_token_and_a_huge_one_a_valid_token(
    host: SamplesOnHost, dtype: torch.dtype
) -> None:
    logits = (torch.randn(2, 500, generator=torch.Generator().manual_seed(0)) * 1000).to(dtype)
    for choice in CHOICES:
        cold, hot = Draw(0, 2e-5, *choice, seed=0, position=0), Draw(1, 1e6, *choice, seed=0, position=0)
        found = host.draw(logits, 500, [cold, hot])
        assert found[0] == int(logits[0].argmax())
        assert 0 <= found[1] < 500


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_fails_alone(host: SamplesOnHost, dtype: torch.dtype, value: float) -> None:
    logits = make_logits(4, 300, 300).to(dtype)
    draws = draws_of(4, 1.0, 0, 0.9, 0.0)
    expected = host.draw(logits, 300, draws)
    logits[2, 299] = value
    logits[3] = -torch.inf
    assert host.draw(logits, 300, draws) == [*expected[:2], -1, -1]


def test_strided_rows_on_any_number_of_threads_draw_the_tokens_of_the_reference(
    cpu: CpuBackend, dtype: torch.dtype
) -> None:
    logits = make_logits(8, 4000, 4000).to(dtype)
    draws = [Draw(row, 0.8, top_k, 0.9, 0.0, row, top_k) for row in (5, 1, 7) for top_k in (0, 20)]
    expected = expected_of(logits[:, 3:], 3900, draws)
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            assert cpu.draw(logits[:, 3:], 3900, draws) == expected
    finally:
        torch.set_num_threads(before)


def test_other_dtypes_are_widened(host: SamplesOnHost) -> None:
    logits = make_logits(4, 300, 300).half()
    draws = draws_of(4, 1.0, 0, 1.0, 0.0)
    assert host.draw(logits, 300, draws) == host.draw(logits.float(), 300, draws)


def test_no_draws_return_an_empty_list(host: SamplesOnHost) -> None:
    assert host.draw(torch.zeros(2, 5), 5, []) == []


@pytest.mark.parametrize(("draw", "message"), [({"row": 2}, "draw.row is 2"), ({"temperature": 1e-6}, "temperature")])
def test_invalid_draws_are_refused(host: SamplesOnHost, draw: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        host.draw(torch.zeros(2, 5), 5, [draws_of(1, 1.0, 0, 1.0, 0.0)[0]._replace(**draw)])
