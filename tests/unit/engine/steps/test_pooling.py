import numpy as np
import pytest
import torch

from loraserve.engine.request import EngineRequest, Pooling, PoolingParams, SamplingParams
from loraserve.engine.scheduling.plan import ScheduledSequence
from loraserve.engine.scheduling.sequence import RequestState, Sequence
from loraserve.engine.steps.pooling import pool


def scheduled(params: PoolingParams, num_rows: int, num_prompt_tokens: int) -> ScheduledSequence:
    request = EngineRequest("r", [1] * num_prompt_tokens, SamplingParams(1), pooling=params)
    sequence = Sequence(RequestState(request, 0.0, b""), 0, [1] * num_prompt_tokens, num_prompt_tokens)
    num_pooled_rows = num_rows if params.pooling is Pooling.MEAN else int(num_rows == num_prompt_tokens)
    return ScheduledSequence(sequence, num_rows, 0, num_pooled_rows)


@pytest.mark.parametrize("pooling", Pooling)
def test_values_that_are_cut_off_must_be_finite_too(pooling: Pooling) -> None:
    """A norm makes zeros of the numbers beside one that is infinite."""
    items = [scheduled(PoolingParams(pooling, dimensions=2, normalize=normalize), 1, 1) for normalize in (True, False)]
    hidden = torch.tensor([[0.0, 0.0, torch.nan], [3.0, 4.0, 7.0]])
    assert [prompt.is_finite for prompt in pool(items, hidden)] == [False, True]


def test_each_prompt_has_its_own_rows() -> None:
    mean, unfinished = scheduled(PoolingParams(Pooling.MEAN), 2, 2), scheduled(PoolingParams(Pooling.MEAN), 1, 2)
    last = scheduled(PoolingParams(Pooling.LAST, dimensions=1, normalize=False), 3, 3)
    hidden = torch.tensor([[1.0, 0.0], [5.0, 8.0], [7.0, 7.0], [2.0, 9.0]])
    pooled = pool([mean, unfinished, last], hidden)
    assert [prompt.sequence for prompt in pooled] == [mean.sequence, last.sequence]
    assert [np.frombuffer(prompt.vector, "<f4").tolist() for prompt in pooled] == [pytest.approx([0.6, 0.8]), [2.0]]
    assert unfinished.sequence.state.hidden_sum is not None
    assert unfinished.sequence.state.hidden_sum.tolist() == [7.0, 7.0]
