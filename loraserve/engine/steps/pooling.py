"""From the hidden states of prompts to one vector each."""

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from loraserve.engine.request import PoolingParams
from loraserve.engine.scheduling.plan import ScheduledSequence
from loraserve.engine.scheduling.sequence import Sequence


class PooledPrompt(NamedTuple):
    sequence: Sequence
    vector: bytes
    """float32 [dimensions]."""
    is_finite: bool


@torch.inference_mode()
def pool(scheduled: Seq[ScheduledSequence], hidden: Tensor) -> list[PooledPrompt]:
    """The prompts that end with a step, before its rows are noted as computed. Waits for the device.

    hidden: [P, hidden_size], of the step's pooled rows.
    """
    pooled: list[PooledPrompt] = []
    end_row = 0
    for item in scheduled:
        if item.num_pooled_rows == 0:
            continue
        sequence, state, params = item.sequence, item.sequence.state, item.sequence.request.pooling
        assert params is not None
        start_row, end_row = end_row, end_row + item.num_pooled_rows
        rows = hidden[start_row:end_row].float()
        if state.wants_mean:
            so_far = rows.sum(dim=0)
            state.hidden_sum = so_far if state.hidden_sum is None else state.hidden_sum + so_far
        if item.num_rows < sequence.num_uncomputed_tokens:
            continue
        vector = rows[-1] if state.hidden_sum is None else state.hidden_sum / sequence.num_tokens
        vector = vector.cpu()
        is_finite = bool(vector.isfinite().all())  # also where it is cut: its blocks are found by others
        pooled.append(PooledPrompt(sequence, _shortened(vector, params).numpy().astype("<f4").tobytes(), is_finite))
    return pooled


def _shortened(vector: Tensor, params: PoolingParams) -> Tensor:
    vector = vector[: params.dimensions]
    return normalize(vector, dim=0) if params.normalize else vector
