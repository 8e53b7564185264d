import numpy as np
import pytest
import torch

from loraserve.engine.request import (
    EngineRequest,
    LabelActivation,
    Pooling,
    PoolingParams,
    SamplingParams,
    to_classify,
)
from loraserve.engine.scheduling.plan import ScheduledSequence
from loraserve.engine.scheduling.sequence import RequestState, Sequence
from loraserve.engine.steps.pooling import pool


def scheduled(params: PoolingParams, num_rows: int, num_prompt_tokens: int) -> ScheduledSequence:
    request = EngineRequest("r", [1] * num_prompt_tokens, SamplingParams(1), adapter_digest="d", pooling=params)
    sequence = Sequence(RequestState(request, 0.0, b""), 0, [1] * num_prompt_tokens, num_prompt_tokens)
    num_pooled_rows = num_rows if params.pooling is Pooling.MEAN else int(num_rows == num_prompt_tokens)
    return ScheduledSequence(sequence, num_rows, 0, num_pooled_rows)


@pytest.mark.parametrize("pooling", Pooling)
def test_values_beyond_the_requested_dimensions_must_be_finite_too(pooling: Pooling) -> None:
    """Normalization turns the values beside an infinite one into zeros."""
    items = [scheduled(PoolingParams(pooling, dimensions=2, normalize=normalize), 1, 1) for normalize in (True, False)]
    hidden = torch.tensor([[0.0, 0.0, torch.nan], [3.0, 4.0, 7.0]])
    assert [prompt.is_finite for prompt in pool(items, hidden)] == [False, True]


class OneHead:
    """The same head for every adapter."""

    def __init__(self, head: torch.Tensor) -> None:
        self._head = head

    def head_of(self, digest: str) -> torch.Tensor:
        assert digest == "d"
        return self._head


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        (LabelActivation.NONE, [2.0, 6.0, 0.0]),
        (LabelActivation.SIGMOID, [0.8807971, 0.9975274, 0.5]),
        (LabelActivation.SOFTMAX, [0.01794253, 0.97962922, 0.00242826]),
    ],
)
def test_a_head_computes_one_number_per_label(activation: LabelActivation, expected: list[float]) -> None:
    heads = OneHead(torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]]))
    vector, labels = PoolingParams(Pooling.LAST, normalize=False), to_classify(activation)
    pooled = pool([scheduled(params, 1, 1) for params in (vector, labels)], torch.tensor([[2.0, 3.0]] * 2), heads)
    found = [np.frombuffer(prompt.vector, "<f4").tolist() for prompt in pooled]
    assert found == [[2.0, 3.0], pytest.approx(expected)]
    assert [prompt.is_finite for prompt in pooled] == [True, True]


@pytest.mark.parametrize(("head", "hidden"), [(1e30, 1e30), (0.0, torch.inf)])
def test_label_numbers_and_the_vector_behind_them_must_be_finite(head: float, hidden: float) -> None:
    items = [scheduled(to_classify(LabelActivation.NONE), 1, 1)]
    (prompt,) = pool(items, torch.tensor([[hidden, 0.0]]), OneHead(torch.tensor([[head, 0.0]])))
    assert not prompt.is_finite


def test_each_prompt_is_pooled_from_its_own_rows() -> None:
    mean, unfinished = scheduled(PoolingParams(Pooling.MEAN), 2, 2), scheduled(PoolingParams(Pooling.MEAN), 1, 2)
    last = scheduled(PoolingParams(Pooling.LAST, dimensions=1, normalize=False), 3, 3)
    hidden = torch.tensor([[1.0, 0.0], [5.0, 8.0], [7.0, 7.0], [2.0, 9.0]])
    pooled = pool([mean, unfinished, last], hidden)
    assert [prompt.sequence for prompt in pooled] == [mean.sequence, last.sequence]
    assert [np.frombuffer(prompt.vector, "<f4").tolist() for prompt in pooled] == [pytest.approx([0.6, 0.8]), [2.0]]
    assert unfinished.sequence.state.hidden_sum is not None
    assert unfinished.sequence.state.hidden_sum.tolist() == [7.0, 7.0]
