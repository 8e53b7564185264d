"""The passes over logits that are on a GPU, and the sampler on them, against the same on the CPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from loraserve.engine.logit_rows import LogitRows, open_rows
from loraserve.engine.request import SamplingParams
from loraserve.engine.sampler import Sampler
from loraserve.engine.sampling_row import SamplingRow

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
RANDOM = SamplingParams(max_tokens=64, temperature=0.8)
IDS = np.array([3, 0, 4])


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=[1, 63, 64, 65, 1000, 1024])
def both(request: pytest.FixtureRequest, dtype: torch.dtype) -> tuple[LogitRows, LogitRows]:
    """(on the GPU, on the CPU); beyond the vocabulary is what must not be looked at."""
    vocab_size = request.param
    padded = torch.full((5, vocab_size + 3), torch.inf)
    padded[:, :vocab_size] = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3
    logits = padded.to(dtype)
    return open_rows(logits.to(DEVICE), vocab_size), open_rows(logits, vocab_size)


def same(found: tuple[np.ndarray, ...] | np.ndarray, expected: tuple[np.ndarray, ...] | np.ndarray) -> bool:
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    return all(np.array_equal(*pair, equal_nan=True) for pair in pairs)


def test_the_largest_logits_are_those_of_the_cpu(both: tuple[LogitRows, LogitRows]) -> None:
    found, expected = both
    assert same(found.argmax(), expected.argmax())
    assert same(found.lane_max(IDS), expected.lane_max(IDS))


@pytest.mark.parametrize(
    "values",
    [
        [1.0, 3.0, 3.0, -2.0],
        [-4.0, -0.0, 0.0, -2.0],
        [1.0, float("inf"), 2.0, 3.0],
        [float("-inf")] * 4,
        [1.0, 2.0, float("nan"), 3.0],
        [1.0, 2.0, -float("nan"), float("inf")],
        [-3.0] * 40 + [-1.0] * 300,
    ],
)
def test_ties_infinities_and_nan_are_those_of_the_cpu(dtype: torch.dtype, values: list[float]) -> None:
    logits = torch.tensor([values, [0.0] * len(values)]).to(dtype)
    found, expected = (open_rows(rows, len(values)).argmax() for rows in (logits.to(DEVICE), logits))
    assert same(found, expected)


def test_a_lanes_mass_is_that_of_the_cpu(both: tuple[LogitRows, LogitRows]) -> None:
    peaks = both[1].argmax()[1][IDS]
    temperatures = np.array([0.5, 1, 2], dtype=np.float32)
    floors = np.array([-np.inf, -1, 0.5], dtype=np.float32)
    found, expected = (rows.lane_mass(IDS, peaks, temperatures, floors) for rows in both)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_what_reaches_a_threshold_is_that_of_the_cpu(both: tuple[LogitRows, LogitRows]) -> None:
    found, expected = both
    thresholds = np.array([-np.inf, 0, 3], dtype=np.float32)
    assert same(found.at_least(IDS, thresholds), expected.at_least(IDS, thresholds))
    values = expected.gather(IDS, np.zeros_like(IDS))
    assert same(found.gather(IDS, np.zeros_like(IDS)), values)
    assert same(found.count_above(IDS, values), expected.count_above(IDS, values))


@pytest.mark.parametrize("row_ids", [IDS, np.arange(5)], ids=["some", "all"])
def test_copies_are_written_to_and_originals_are_not(both: tuple[LogitRows, LogitRows], row_ids: np.ndarray) -> None:
    def everything(rows: LogitRows, num_rows: int) -> tuple[np.ndarray, ...]:
        return rows.at_least(np.arange(num_rows), np.full(num_rows, -np.inf, dtype=np.float32))

    before = everything(both[0], 5)
    copies = [rows.copy_rows(row_ids, np.arange(len(row_ids)) == 1) for rows in both]
    for copy in copies:
        copy.put(np.array([0, 1]), np.array([0, 0]), np.array([1.5, 2.5], dtype=np.float32))
    found, expected = (everything(copy, len(row_ids)) for copy in copies)
    assert same(found, expected)
    assert same(everything(both[0], 5), before)


def test_a_row_alone_is_the_row_in_a_batch_and_the_row_of_the_cpu() -> None:
    vocab_size = 50_257
    params = [GREEDY, RANDOM, replace(RANDOM, top_p=0.9), replace(RANDOM, top_k=50), replace(RANDOM, min_p=0.01)]
    logits = torch.randn(40, vocab_size, generator=torch.Generator().manual_seed(0))
    rows = [SamplingRow(replace(params[index % 5], logprobs=2), 0, index, (), (), (2, 3)) for index in range(40)]
    sampler = Sampler(vocab_size, vocab_size)

    together = sampler.sample(logits.to(DEVICE), rows)

    for index, row in enumerate(rows):
        alone = sampler.sample(logits[index : index + 1].to(DEVICE), [row])
        assert (alone.token_ids[0], alone.logprobs[0]) == (together.token_ids[index], together.logprobs[index])
    assert together.token_ids == sampler.sample(logits, rows).token_ids
