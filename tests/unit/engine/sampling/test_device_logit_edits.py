"""Logit edits and token counts on a device match those of the host's sampler, batch after batch."""

from typing import Any

import torch
from loraserve_kernels.host_sampling import ReferenceSampling
from loraserve_kernels.logit_edits import IN_PROMPT, LogitEdits, count_tokens_reference
from loraserve_kernels.sampling import sample_reference
from torch import Tensor

from loraserve.engine.request import SamplingParams
from loraserve.engine.sampling.device_logit_edits import DeviceLogitEdits
from loraserve.engine.sampling.row import SamplingRow
from loraserve.engine.sampling.sampler import Sampler
from loraserve.engine.sampling.token_counts import TokenCounts
from tests.support.delayed_accelerator import DelayedAccelerator
from tests.support.host_accelerator import HostAccelerator

VOCAB_SIZE, EOS = 12, 7
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.6}


def row(prompt: list[int] | None = None, outputs: list[int] | None = None, **params: object) -> SamplingRow:
    sampling = SamplingParams(max_tokens=99, temperature=0.0, **params)  # type: ignore[arg-type]
    return SamplingRow(sampling, 0, 0, [1, 2] if prompt is None else prompt, outputs or [], (EOS,))


def flat_logits(num_rows: int) -> Tensor:
    """So close together that each penalty changes the best token."""
    return 2 + torch.rand(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))


def choose(edits: LogitEdits, logits: Tensor) -> list[int]:
    token_ids, is_finite = sample_reference(logits, VOCAB_SIZE, None, edits)
    count_tokens_reference(edits, token_ids, is_finite)
    assert is_finite.all()
    return token_ids.tolist()


def test_upload_returns_none_for_a_batch_without_edits() -> None:
    edits = DeviceLogitEdits(HostAccelerator(), VOCAB_SIZE, 4)
    assert edits.upload([row(), row(outputs=[3, 3], min_tokens=2)]) is None


def test_tokens_that_the_host_has_not_seen_are_counted() -> None:
    """Up to two per row, each the next batch's input; `min_tokens` counts them too."""
    device = DeviceLogitEdits(HostAccelerator(), VOCAB_SIZE, 3)
    logits = flat_logits(3)
    logits[:, EOS] = 9.0
    rows = [row(min_tokens=2, **PENALTIES), row(), row(min_tokens=1, logit_bias={3: 0.5})]
    expected = [[], [], []]
    for num_unknown in range(3):
        found = Sampler(VOCAB_SIZE, VOCAB_SIZE, ReferenceSampling()).sample(
            logits, [row(outputs=outputs, **kwargs) for outputs, kwargs in zip(expected, _kwargs(rows), strict=True)]
        )
        for each in rows:
            each.num_unknown_tokens = num_unknown
        edits = device.upload(rows)
        assert edits is not None
        assert choose(edits, logits) == found.token_ids
        for outputs, token_id in zip(expected, found.token_ids, strict=True):
            outputs.append(token_id)
    assert expected[0][-1] == EOS
    assert expected[2][0] != EOS


def _kwargs(rows: list[SamplingRow]) -> list[dict[str, Any]]:
    names = ("min_tokens", "logit_bias", *PENALTIES)
    return [{name: getattr(each.params, name) for name in names} for each in rows]


def test_buffers_grow_with_the_tokens_that_a_batch_lists() -> None:
    vocab_size = 3000
    device = DeviceLogitEdits(DelayedAccelerator(), vocab_size, 2)
    bias = {token_id: float(token_id) for token_id in range(0, vocab_size, 2)}
    rows = [row(logit_bias=bias, allowed_token_ids=tuple(range(100))), row(logit_bias={5: 1.0})]
    edits = device.upload(rows)
    assert edits is not None
    assert edits.start.tolist() == [0, 1550, 1551]
    assert edits.token_ids[-1] == 5
    assert edits.biases.sum() == sum(bias.values()) + 1
    assert edits.is_blank.tolist() == [1, 0]


def test_edits_of_a_batch_stay_valid_while_those_of_the_next_are_uploaded() -> None:
    device = DeviceLogitEdits(DelayedAccelerator(), VOCAB_SIZE, 2)
    first = device.upload([row(logit_bias={5: 1.0})])
    second = device.upload([row(logit_bias={6: 2.0})])
    assert first is not None
    assert second is not None
    assert (first.token_ids.tolist(), second.token_ids.tolist()) == ([5], [6])


def test_upload_waits_only_for_the_second_to_last_batch() -> None:
    accelerator = DelayedAccelerator()
    device = DeviceLogitEdits(accelerator, VOCAB_SIZE, 2)
    for _ in range(2):
        device.upload([row(logit_bias={5: 1.0}, **PENALTIES)])
    first, second = accelerator.events
    device.upload([row(logit_bias={5: 1.0}, **PENALTIES)])
    assert (first.is_done, second.is_done) == (True, False)


# Which sequence a row of the counts belongs to.


class Counted:
    """A sequence with penalties, as `DeviceLogitEdits` passes it to `TokenCounts`."""

    def __init__(self, counts: TokenCounts, prompt: list[int]) -> None:
        self.row = row(prompt, **PENALTIES)
        self._counts = counts
        self._device = DeviceLogitEdits(HostAccelerator(), VOCAB_SIZE, 1)
        self._device._counts = counts

    def append(self, token_id: int) -> int:
        """Choose a token; returns the sequence's row of the counts, which must match its tokens so far."""
        edits = self._device.upload([self.row])
        assert edits is not None
        count_row = int(edits.count_row[0])
        expected = [
            self.row.output_token_ids.count(i) | IN_PROMPT * (i in self.row.prompt_token_ids) for i in range(12)
        ]
        assert self._counts.tensor[count_row].tolist() == expected
        count_tokens_reference(edits, torch.tensor([token_id]), torch.tensor([True]))
        self.row.output_token_ids = [*self.row.output_token_ids, token_id]
        return count_row


def test_a_sequence_keeps_its_count_row_until_another_takes_it_and_then_gets_a_new_one() -> None:
    counts = TokenCounts(torch.device("cpu"), VOCAB_SIZE, 2)
    a, b, c = (Counted(counts, prompt) for prompt in ([1, 2], [3, 99], [4]))
    rows = [a.append(5), b.append(5), a.append(6)]
    assert rows[0] == rows[2] != rows[1]
    assert c.append(8) == rows[1]
    assert a.append(5) == rows[0]
    assert b.append(9) == rows[1]
    assert c.append(8) == rows[0]


def test_counts_are_rebuilt_if_tokens_were_chosen_elsewhere() -> None:
    counts = TokenCounts(torch.device("cpu"), VOCAB_SIZE, 2)
    a = Counted(counts, [1, 2])
    a.append(5)
    a.row.output_token_ids = [5, 6, 6]
    a.append(4)
