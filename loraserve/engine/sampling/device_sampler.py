"""Chooses tokens on the logits' device, with one copy to the host for a whole batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
from loraserve_kernels.sampling import SamplesOnDevice
from torch import Tensor

from loraserve.engine.device.accelerator import Accelerator, Event
from loraserve.engine.device.step_buffers import StepBuffers
from loraserve.engine.request import TokenLogprob
from loraserve.engine.sampling.columns import DeviceSampling, SamplingColumns
from loraserve.engine.sampling.device_logit_edits import DeviceLogitEdits
from loraserve.engine.sampling.device_logprobs import QueuedLogprobs, prompt_logprobs, queue_logprobs
from loraserve.engine.sampling.row import SamplingRow

_NOT_FINITE = -1


@dataclass(slots=True)
class QueuedTokens:
    """One token per row, being chosen on the device and then copied to the host."""

    _on_device: Tensor
    """int64 [R], `_NOT_FINITE` for a row that is not finite."""
    _on_host: Tensor
    """The same values in page-locked memory, once they are copied."""
    _copied: Event
    _logprobs: QueuedLogprobs | None = None
    """On the host once the tokens are."""

    def wait(self) -> tuple[list[int], list[bool]]:
        """Wait for (token ids, are finite). To be called before the device sampler queues a second batch after this
        one."""
        self._copied.synchronize()
        chosen = self._on_host.tolist()
        return [max(token_id, 0) for token_id in chosen], [token_id != _NOT_FINITE for token_id in chosen]

    def logprobs(self, token_ids: list[int], is_finite: list[bool]) -> list[TokenLogprob | None]:
        """For what `wait` returned; None if a row requests none or is not finite."""
        return [None] * len(token_ids) if self._logprobs is None else self._logprobs.read(token_ids, is_finite)

    def copy_to(self, token_ids: Tensor, chosen_rows: Tensor, rows: Tensor) -> None:
        """Queue a copy of the tokens of `chosen_rows` to `rows` of `token_ids`; any token for a row that is not finite.

        chosen_rows, rows: int64, aligned, on the device of `token_ids`. Waits for nothing.
        """
        token_ids.index_copy_(0, rows, self._on_device.index_select(0, chosen_rows).clamp_(min=0))


class DeviceSampler:
    """Tokens and log-probabilities are those of `SamplesOnHost`, except for rounding."""

    def __init__(self, backend: SamplesOnDevice, accelerator: Accelerator, vocab_size: int, max_num_rows: int) -> None:
        self._backend = backend
        self._accelerator = accelerator
        self._vocab_size = vocab_size
        # NOTE: two, because a batch is queued while the one before runs: that one's tokens have not arrived yet, and
        # buffers copied after its forward pass could only be overwritten after waiting for it.
        self._turns = cycle([_Buffers(accelerator, max_num_rows) for _ in range(2)])
        self._edits = DeviceLogitEdits(accelerator, vocab_size, max_num_rows)

    def queue(
        self, logits: Tensor, rows: Sequence[SamplingRow], sampling: DeviceSampling | None = None
    ) -> QueuedTokens:
        """Choose tokens from logits [R, at least vocab_size]. Waits for no batch except the second to last.

        sampling: of the rows, if it is on the device already.
        """
        buffers = next(self._turns)
        if sampling is None:
            sampling = buffers.upload(rows)
        edits = self._edits.upload(rows)
        token_ids, is_finite = self._backend.sample(logits, self._vocab_size, sampling.draws, edits)
        if edits is not None:
            self._backend.count_tokens(edits, token_ids, is_finite)
        logprobs = None
        if sampling.scored_rows is not None:
            logprobs = queue_logprobs(
                logits, self._vocab_size, rows, token_ids, sampling.scored_rows, self._accelerator
            )
        on_device = torch.where(is_finite, token_ids, _NOT_FINITE)
        on_host = buffers.chosen[: len(rows)]
        return QueuedTokens(on_device, on_host, self._accelerator.copy_back(on_device, on_host), logprobs)

    def prompt_logprobs(self, logits: Tensor, target_token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
        """See `Sampler.prompt_logprobs`."""
        return prompt_logprobs(logits, self._vocab_size, target_token_ids, num_top)


class _Buffers:
    """Page-locked memory for one batch."""

    def __init__(self, accelerator: Accelerator, max_num_rows: int) -> None:
        self._storage = StepBuffers(SamplingColumns.specs(max_num_rows), accelerator)
        self._columns = SamplingColumns(self._storage.buffers)
        self.chosen = accelerator.host_buffer(max_num_rows * torch.int64.itemsize).view(torch.int64)

    def upload(self, rows: Sequence[SamplingRow]) -> DeviceSampling:
        """The rows' sampling parameters, on the device for work queued from now on."""
        self._storage.wait()
        sampling = self._columns.fill(rows)
        if sampling.draws is not None or sampling.scored_rows is not None:
            self._storage.upload(self._columns.end_bytes)
        return sampling
