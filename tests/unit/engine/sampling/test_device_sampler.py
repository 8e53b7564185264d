"""If the device samples, tokens are those of the host's sampler, whatever else is in the batch."""

import pytest
import torch
from loraserve_kernels.host_sampling import ReferenceSampling
from loraserve_kernels.logit_edits import LogitEdits, count_tokens_reference
from loraserve_kernels.sampling import DrawParams, SamplesOnDevice, sample_reference
from torch import Tensor

from loraserve.engine.request import SamplingParams
from loraserve.engine.sampling.device_sampler import DeviceSampler
from loraserve.engine.sampling.row import SamplingRow
from loraserve.engine.sampling.sampler import Sampler
from tests.support.delayed_accelerator import DelayedAccelerator
from tests.support.hash_model import approximately
from tests.support.host_accelerator import HostAccelerator

VOCAB_SIZE, LOGITS_SIZE = 150, 160


class SamplingBackend:
    def __init__(self) -> None:
        self.draws: list[DrawParams | None] = []
        self.edits: list[LogitEdits | None] = []

    def sample(
        self, logits: Tensor, vocab_size: int, draws: DrawParams | None, edits: LogitEdits | None
    ) -> tuple[Tensor, Tensor]:
        self.draws.append(draws)
        self.edits.append(edits)
        return sample_reference(logits, vocab_size, draws, edits)

    def count_tokens(self, edits: LogitEdits, token_ids: Tensor, is_finite: Tensor) -> None:
        count_tokens_reference(edits, token_ids, is_finite)


@pytest.fixture
def backend() -> SamplingBackend:
    backend = SamplingBackend()
    assert isinstance(backend, SamplesOnDevice)
    return backend


def on_device(backend: SamplingBackend) -> Sampler:
    device = DeviceSampler(backend, HostAccelerator(), VOCAB_SIZE, 8)
    return Sampler(VOCAB_SIZE, LOGITS_SIZE, ReferenceSampling(), device)


def row(seed: int = 3, position: int = 11, **params: object) -> SamplingRow:
    return SamplingRow(SamplingParams(max_tokens=9, **params), seed, position, [1, 2], [5], (7,))  # type: ignore[arg-type]


GREEDY = row(temperature=0.0)
DRAWN = [
    row(seed=-1, temperature=0.7, top_k=5),
    row(seed=1 << 63, position=2, temperature=1.3, top_p=0.8),
    row(seed=5, temperature=1.0, min_p=0.05),
]
OTHERS = [
    row(temperature=0.0, logprobs=2),
    row(temperature=0.9, logit_bias={4: 50.0}),
    row(temperature=0.0, repetition_penalty=1.5),
    row(temperature=0.0, logprobs=0, allowed_token_ids=(4, 9, 200)),
    row(temperature=1.2, logprobs=200, min_tokens=2),
]


def logits(num_rows: int) -> Tensor:
    return torch.randn(num_rows, LOGITS_SIZE, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize(
    "rows",
    [[GREEDY, GREEDY], DRAWN, [GREEDY, *DRAWN], OTHERS, [OTHERS[0], GREEDY, OTHERS[1], *DRAWN, *OTHERS[2:4]]],
    ids=["greedy", "drawn", "both", "others", "all"],
)
def test_tokens_and_logprobs_match_the_host(backend: SamplingBackend, rows: list[SamplingRow]) -> None:
    expected = Sampler(VOCAB_SIZE, LOGITS_SIZE, ReferenceSampling()).sample(logits(len(rows)), rows)
    expected.logprobs = [None if each is None else approximately(each) for each in expected.logprobs]
    assert on_device(backend).sample(logits(len(rows)), rows) == expected


def test_prompt_logprobs_match_the_host(backend: SamplingBackend) -> None:
    expected = Sampler(VOCAB_SIZE, LOGITS_SIZE, ReferenceSampling()).prompt_logprobs(logits(3), [4, 149, 0], 5)
    found = on_device(backend).prompt_logprobs(logits(3), [4, 149, 0], 5)
    assert found == [approximately(each) for each in expected]
    assert on_device(backend).prompt_logprobs(logits(0), [], 5) == []


def test_a_greedy_batch_passes_no_draws_or_edits_to_the_backend(backend: SamplingBackend) -> None:
    on_device(backend).sample(logits(2), [GREEDY, GREEDY])
    assert backend.draws == [None]
    assert backend.edits == [None]


def test_a_nonfinite_row_is_reported_and_does_not_affect_other_rows(backend: SamplingBackend) -> None:
    broken = logits(3)
    broken[1, 4] = torch.nan
    sampled = on_device(backend).sample(broken, [GREEDY, GREEDY, DRAWN[0]])
    assert sampled.is_finite == [True, False, True]
    assert sampled.token_ids[0] == int(broken[0, :VOCAB_SIZE].argmax())


def test_parameters_of_the_previous_step_are_not_reused(backend: SamplingBackend) -> None:
    sampler = on_device(backend)
    sampler.sample(logits(4), [*DRAWN, GREEDY])
    expected = Sampler(VOCAB_SIZE, LOGITS_SIZE, ReferenceSampling()).sample(logits(2), [GREEDY, DRAWN[1]])
    assert sampler.sample(logits(2), [GREEDY, DRAWN[1]]) == expected


def test_tokens_of_two_batches_can_be_in_flight(backend: SamplingBackend) -> None:
    """Before the host has waited, its buffers contain the tokens of neither."""
    accelerator = DelayedAccelerator()
    device = DeviceSampler(backend, accelerator, VOCAB_SIZE, 8)
    batches = [(logits(4), [*DRAWN, GREEDY]), (-logits(2), [GREEDY, DRAWN[1]])]
    queued = [device.queue(values, rows) for values, rows in batches]
    assert not any(event.is_done for event in accelerator.events)
    for (values, rows), tokens in zip(batches, queued, strict=True):
        expected = Sampler(VOCAB_SIZE, LOGITS_SIZE, ReferenceSampling()).sample(values, rows)
        assert tokens._on_host.tolist() != expected.token_ids
        assert tokens.wait() == (expected.token_ids, expected.is_finite)


def test_a_third_batch_waits_only_for_the_parameters_of_the_first(backend: SamplingBackend) -> None:
    accelerator = DelayedAccelerator()
    device = DeviceSampler(backend, accelerator, VOCAB_SIZE, 8)
    for _ in range(2):
        device.queue(logits(1), DRAWN[:1])
    first_parameters, first_tokens, *of_second = list(accelerator.events)
    device.queue(logits(1), DRAWN[:1])
    assert first_parameters.is_done
    assert not any(event.is_done for event in (first_tokens, *of_second))


def test_tokens_are_copied_on_the_device_and_a_nonfinite_row_gives_a_valid_token(
    backend: SamplingBackend,
) -> None:
    broken = logits(3)
    broken[1, 4] = torch.nan
    accelerator = DelayedAccelerator()
    queued = DeviceSampler(backend, accelerator, VOCAB_SIZE, 8).queue(broken, [GREEDY] * 3)
    token_ids = torch.full((5,), -7)
    queued.copy_to(token_ids, torch.tensor([2, 1, 0]), torch.tensor([0, 2, 4]))
    assert not any(event.is_done for event in accelerator.events)
    best = broken[:, :VOCAB_SIZE].argmax(1).tolist()
    assert token_ids.tolist() == [best[2], -7, 0, -7, best[0]]
    assert queued.wait() == ([best[0], 0, best[2]], [True, False, True])
