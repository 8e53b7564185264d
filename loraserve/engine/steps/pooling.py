"""From the hidden states of each prompt to one vector, or to a number for each label of a classifier."""

from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import normalize

from loraserve.engine.request import LabelActivation, PoolingParams
from loraserve.engine.scheduling.plan import ScheduledSequence
from loraserve.engine.scheduling.sequence import Sequence

_ACTIVATIONS: dict[LabelActivation, Callable[[Tensor], Tensor]] = {
    LabelActivation.NONE: lambda numbers: numbers,
    LabelActivation.SIGMOID: torch.sigmoid,
    LabelActivation.SOFTMAX: lambda numbers: torch.softmax(numbers, dim=0),
}


class PooledPrompt(NamedTuple):
    sequence: Sequence
    vector: bytes
    """float32 [dimensions], or [num_labels] from a classifier."""
    is_finite: bool


class Heads(Protocol):
    """See `AdapterMemory`."""

    def head_of(self, digest: str) -> Tensor: ...


@torch.inference_mode()
def pool(scheduled: Seq[ScheduledSequence], hidden: Tensor, heads: Heads | None = None) -> list[PooledPrompt]:
    """Pool the prompts that end with a step, before its rows are recorded as computed. Waits for the device.

    hidden: [P, hidden_size], the step's pooled rows. heads: of the classifiers among the adapters.
    """
    vectors: list[tuple[Sequence, PoolingParams, Tensor]] = []
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
        vectors.append((sequence, params, vector))
    numbers = _numbers_of_labels(vectors, heads)
    pooled: list[PooledPrompt] = []
    for sequence, params, vector in vectors:
        answer = numbers.get(sequence, vector).cpu()
        # Check the whole vector, even if only part of it is returned: other requests can find its blocks.
        is_finite = bool(vector.isfinite().all() and answer.isfinite().all())
        pooled.append(PooledPrompt(sequence, _shortened(answer, params).numpy().astype("<f4").tobytes(), is_finite))
    return pooled


def _numbers_of_labels(
    vectors: Seq[tuple[Sequence, PoolingParams, Tensor]], heads: Heads | None
) -> dict[Sequence, Tensor]:
    """For prompts that request labels. Each head is read once for all of its vectors: the largest take longer than a
    step."""
    by_head: dict[str, list[tuple[Sequence, LabelActivation, Tensor]]] = defaultdict(list)
    for sequence, params, vector in vectors:
        digest = sequence.request.adapter_digest
        if params.labels is not None and digest is not None:
            by_head[digest].append((sequence, params.labels, vector))
    numbers: dict[Sequence, Tensor] = {}
    for digest, entries in by_head.items():
        assert heads is not None
        rows = torch.stack([vector for _, _, vector in entries]) @ heads.head_of(digest).T
        numbers |= {
            sequence: _ACTIVATIONS[labels](row) for (sequence, labels, _), row in zip(entries, rows, strict=True)
        }
    return numbers


def _shortened(vector: Tensor, params: PoolingParams) -> Tensor:
    vector = vector[: params.dimensions]
    return normalize(vector, dim=0) if params.normalize else vector
