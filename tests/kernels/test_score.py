"""Log-probabilities in C against `score_reference`, which sorts whole rows in float64."""

import math
from collections.abc import Sequence

import pytest
import torch
from loraserve_kernels.cpu_backend import CpuBackend
from loraserve_kernels.host_sampling import SamplesOnHost
from loraserve_kernels.sampling import make_logits
from loraserve_kernels.score import Score, ScoreQuery, score_reference
from torch import Tensor

TOLERANCE = 1e-6
"""Absolute and relative, of a log-probability: weights are float32, summed in float32 1,024 at a time."""


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def queries_of(logits: Tensor, num_columns: int, num_tops: Sequence[int]) -> list[ScoreQuery]:
    """For each row: its most likely token, its least likely one and one between."""
    queries = []
    for row in range(len(logits)):
        order = logits[row, :num_columns].float().argsort()
        for place in (-1, 0, num_columns // 2):
            queries.append(ScoreQuery(row, int(order[place]), num_tops[len(queries) % len(num_tops)]))
    return queries


def about(score: Score) -> Score:
    def number(value: float) -> float:
        return pytest.approx(value, abs=TOLERANCE, rel=TOLERANCE)  # type: ignore[return-value]

    return Score(number(score.logprob), score.rank, [(token_id, number(value)) for token_id, value in score.top])


def assert_as_reference(cpu: CpuBackend, logits: Tensor, num_columns: int, queries: Sequence[ScoreQuery]) -> None:
    found = cpu.score(logits, num_columns, queries)
    assert found == [about(score) for score in score_reference(logits, num_columns, queries)]


@pytest.mark.parametrize("num_columns", [1, 2, 15, 16, 17, 64, 301, 2500, 16_001])
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_scores_equal_those_of_the_reference(
    cpu: CpuBackend, dtype: torch.dtype, num_columns: int, scale: float
) -> None:
    """Values after the last column are larger than all others."""
    logits = torch.cat([make_logits(6, num_columns, min(num_columns, 40)) * scale, torch.full((6, 5), 99.0)], 1)
    queries = queries_of(logits.to(dtype), num_columns, [0, 1, 5, 20, 64, num_columns, num_columns + 7])
    assert_as_reference(cpu, logits.to(dtype), num_columns, queries)


def test_the_tolerance_catches_a_missing_column(cpu: CpuBackend) -> None:
    logits = make_logits(1, 16_000, 16_000)
    query = ScoreQuery(0, 7, 0)
    (expected,) = score_reference(logits, 16_000, [query])
    assert cpu.score(logits, 15_999, [query]) != [about(expected)]


@pytest.mark.parametrize("num_top", [1, 3, 16, 100, 999, 1000])
def test_equal_logits_share_a_rank_and_are_ordered_by_ascending_id(
    cpu: CpuBackend, dtype: torch.dtype, num_top: int
) -> None:
    logits = torch.zeros(2, 1000, dtype=dtype)
    logits[0, ::2] *= -1  # minus zero is zero
    logits[1] = torch.randint(-2, 2, (1000,), generator=torch.Generator().manual_seed(1))
    assert [token_id for token_id, _ in cpu.score(logits, 1000, [ScoreQuery(0, 5, num_top)])[0].top] == list(
        range(num_top)
    )
    assert_as_reference(
        cpu, logits, 1000, [ScoreQuery(0, 999, num_top), *(ScoreQuery(1, token, num_top) for token in range(20))]
    )


def test_scores_of_ascending_and_descending_logits_equal_the_reference(cpu: CpuBackend, dtype: torch.dtype) -> None:
    """Every token, or none, is likelier than the tokens before it."""
    ascending = torch.arange(-100, 100).to(dtype)
    logits = torch.stack([ascending, ascending.flip(0)])
    assert_as_reference(cpu, logits, 200, [ScoreQuery(row, 40, num_top) for row in (0, 1) for num_top in (1, 7, 150)])


def test_a_token_without_probability_has_a_logprob_of_minus_infinity(cpu: CpuBackend, dtype: torch.dtype) -> None:
    logits = torch.full((1, 700), -torch.inf, dtype=dtype)
    logits[0, [300, 600]] = torch.tensor([1.0, 2.0], dtype=dtype)
    assert_as_reference(cpu, logits, 700, [ScoreQuery(0, token_id, 5) for token_id in (0, 300, 600)])
    assert cpu.score(logits, 700, [ScoreQuery(0, 0, 0)]) == [Score(-math.inf, 3, [])]


def test_scores_of_huge_logits_equal_the_reference(cpu: CpuBackend, dtype: torch.dtype) -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0, 3e38], [-3e38, -3e38, -3e38, -3e38]], dtype=dtype)
    assert_as_reference(cpu, logits, 4, [ScoreQuery(row, token_id, 4) for row in (0, 1) for token_id in range(4)])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_fails_alone(host: SamplesOnHost, dtype: torch.dtype, value: float) -> None:
    logits = make_logits(4, 300, 300).to(dtype)
    queries = [ScoreQuery(row, 299, 3) for row in range(4)]
    expected = host.score(logits, 300, queries)
    logits[2, 299] = value
    logits[3] = -torch.inf
    found = host.score(logits, 300, queries)
    assert found[:2] == expected[:2]
    for score in found[2:]:
        assert math.isnan(score.logprob)
        assert (score.rank, score.top) == (1, [])


def test_a_score_depends_only_on_its_row_and_query(cpu: CpuBackend, dtype: torch.dtype) -> None:
    """Strided rows in any order, the same row twice, any number of threads."""
    logits = make_logits(8, 4000, 4000).to(dtype)[:, 3:]
    queries = [ScoreQuery(row, 7 * row, num_top) for row in (5, 1, 7, 5) for num_top in (0, 20, 3900)]
    alone = [
        cpu.score(logits[query.row : query.row + 1].clone(), 3900, [query._replace(row=0)])[0] for query in queries
    ]
    assert_as_reference(cpu, logits, 3900, queries)
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            assert cpu.score(logits, 3900, queries) == alone
    finally:
        torch.set_num_threads(before)


def test_other_dtypes_are_widened(host: SamplesOnHost) -> None:
    logits = make_logits(4, 300, 300).half()
    queries = queries_of(logits, 300, [3])
    assert host.score(logits, 300, queries) == host.score(logits.float(), 300, queries)


def test_no_queries_return_an_empty_list(host: SamplesOnHost) -> None:
    assert host.score(torch.zeros(2, 5), 5, []) == []


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (ScoreQuery(2, 0, 0), "query.row is 2"),
        (ScoreQuery(-1, 0, 0), "query.row is -1"),
        (ScoreQuery(0, 4, 0), "query.token_id is 4"),
        (ScoreQuery(0, -1, 0), "query.token_id is -1"),
        (ScoreQuery(0, 0, -1), "query.num_top is -1"),
    ],
)
def test_invalid_queries_are_refused(host: SamplesOnHost, query: ScoreQuery, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        host.score(torch.zeros(2, 5), 4, [query])
