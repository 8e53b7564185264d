"""Log-probabilities computed on a device are the host sampler's, except for rounding."""

from math import isnan

import pytest
import torch
from loraserve_kernels.host_sampling import ReferenceSampling
from torch import Tensor

from loraserve.engine.request import SamplingParams
from loraserve.engine.sampling.device_logprobs import ROWS_PER_CHUNK, prompt_logprobs, queue_logprobs
from loraserve.engine.sampling.row import SamplingRow
from loraserve.engine.sampling.sampler import Sampler
from tests.support.delayed_accelerator import DelayedAccelerator
from tests.support.hash_model import approximately

VOCAB_SIZE, LOGITS_SIZE = 150, 160


def row(logprobs: int | None) -> SamplingRow:
    return SamplingRow(SamplingParams(max_tokens=9, temperature=0.0, logprobs=logprobs), 0, 0, [1], [], (7,))


def assert_as_on_the_host(logits: Tensor, rows: list[SamplingRow]) -> None:
    """Compares the log-probabilities with the host's; they are read only after the device has sent them."""
    expected = Sampler(VOCAB_SIZE, LOGITS_SIZE, ReferenceSampling()).sample(logits, rows)
    accelerator = DelayedAccelerator()
    scored_rows = torch.tensor([index for index, each in enumerate(rows) if each.params.logprobs is not None])
    queued = queue_logprobs(logits, VOCAB_SIZE, rows, torch.tensor(expected.token_ids), scored_rows, accelerator)
    assert not accelerator.events[-1].is_done
    accelerator.events[-1].synchronize()
    found = queued.read(expected.token_ids, expected.is_finite)
    assert found == [None if each is None else approximately(each) for each in expected.logprobs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equal_logits_are_listed_by_ascending_id_and_share_a_rank(dtype: torch.dtype) -> None:
    logits = torch.randint(-3, 3, (3, LOGITS_SIZE), generator=torch.Generator().manual_seed(0)).to(dtype) / 2
    logits[1, ::2] *= -0.0
    logits[2, 5:140] = -torch.inf
    assert_as_on_the_host(logits, [row(60), row(100), row(500)])


def test_logprobs_of_some_or_all_rows_in_chunks_match_the_host() -> None:
    num_rows = 2 * ROWS_PER_CHUNK + 5
    logits = torch.randn(num_rows, LOGITS_SIZE, generator=torch.Generator().manual_seed(0)) * 4
    assert_as_on_the_host(logits, [row((None, 0, 3)[i % 3]) for i in range(num_rows)])
    assert_as_on_the_host(logits, [row(0)] * num_rows)


def test_a_nonfinite_row_has_no_logprobs_and_does_not_affect_other_rows() -> None:
    logits = torch.randn(4, LOGITS_SIZE, generator=torch.Generator().manual_seed(0))
    logits[0, 3], logits[2, 9], logits[3] = torch.nan, torch.inf, -torch.inf
    assert_as_on_the_host(logits, [row(2)] * 4)


@pytest.mark.parametrize("num_top", [0, 3, 500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompt_logprobs_in_chunks_match_the_host(dtype: torch.dtype, num_top: int) -> None:
    num_rows = 2 * ROWS_PER_CHUNK + 5
    logits = torch.randn(num_rows, LOGITS_SIZE, generator=torch.Generator().manual_seed(0)).to(dtype) * 4
    targets = [7 * index % VOCAB_SIZE for index in range(num_rows)]
    expected = Sampler(VOCAB_SIZE, LOGITS_SIZE, ReferenceSampling()).prompt_logprobs(logits, targets, num_top)
    assert prompt_logprobs(logits, VOCAB_SIZE, targets, num_top) == [approximately(each) for each in expected]


def test_a_nonfinite_prompt_row_has_no_logprobs_and_does_not_affect_other_rows() -> None:
    logits = torch.randn(4, LOGITS_SIZE, generator=torch.Generator().manual_seed(0))
    logits[0, 3], logits[2, 9], logits[3] = torch.nan, torch.inf, -torch.inf
    found = prompt_logprobs(logits, VOCAB_SIZE, [3, 5, 2, 7], 2)
    expected = Sampler(VOCAB_SIZE, LOGITS_SIZE, ReferenceSampling()).prompt_logprobs(logits[1:2], [5], 2)
    assert found[1] == approximately(expected[0])
    assert all(isnan(found[row].logprob) and found[row].rank == 1 and not found[row].top for row in (0, 2, 3))
