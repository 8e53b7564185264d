"""Tokens chosen where the logits are, one copy to the host for a whole batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import torch
from loraserve_kernels.sampling import DrawParams, SamplesOnDevice
from torch import Tensor

from loraserve.engine.accelerator import Accelerator, Event
from loraserve.engine.device_logit_edits import DeviceLogitEdits
from loraserve.engine.device_logprobs import QueuedLogprobs, queue_logprobs
from loraserve.engine.request import TokenLogprob
from loraserve.engine.sampling_row import SamplingRow
from loraserve.engine.step_buffers import BufferSpec, StepBuffers

_UINT64_MASK = (1 << 64) - 1
_NOT_FINITE = -1


@dataclass(slots=True)
class QueuedTokens:
    """A token a row, being chosen on the device and then copied to the host."""

    _on_device: Tensor
    """int64 [R], `_NOT_FINITE` for a row that is not."""
    _on_host: Tensor
    """Of the same values, in page-locked memory, once they are copied."""
    _copied: Event
    _logprobs: QueuedLogprobs | None = None
    """Here with the tokens."""

    def wait(self) -> tuple[list[int], list[bool]]:
        """(token ids, are finite), once they are here. Before the device sampler's next but one batch is queued."""
        self._copied.synchronize()
        chosen = self._on_host.tolist()
        return [max(token_id, 0) for token_id in chosen], [token_id != _NOT_FINITE for token_id in chosen]

    def logprobs(self, token_ids: list[int], is_finite: list[bool]) -> list[TokenLogprob | None]:
        """Of what `wait` returned; None where none was asked for or the row is not finite."""
        return [None] * len(token_ids) if self._logprobs is None else self._logprobs.read(token_ids, is_finite)

    def copy_to(self, token_ids: Tensor, chosen_rows: Tensor, rows: Tensor) -> None:
        """Queue a copy of these rows' tokens to rows of `token_ids`; of a row that is not finite, any token.

        chosen_rows, rows: int64, aligned, on the device as `token_ids`. Waits for nothing.
        """
        token_ids.index_copy_(0, rows, self._on_device.index_select(0, chosen_rows).clamp_(min=0))


class DeviceSampler:
    """Draws are those of `token_choice` and log-probabilities those of `sampler`, but for rounding."""

    def __init__(self, backend: SamplesOnDevice, accelerator: Accelerator, vocab_size: int, max_num_rows: int) -> None:
        self._backend = backend
        self._accelerator = accelerator
        self._vocab_size = vocab_size
        # NOTE: two, for a batch that is queued while the one before runs: the parameters of that one were copied behind
        # its forward pass, so that to overwrite them would be to wait for it.
        self._turns = cycle([_Buffers(accelerator, max_num_rows) for _ in range(2)])
        self._edits = DeviceLogitEdits(accelerator, vocab_size, max_num_rows)

    def queue(self, logits: Tensor, rows: Sequence[SamplingRow]) -> QueuedTokens:
        """Of logits [R, at least vocab_size]. Waits for no batch but the last but one."""
        buffers = next(self._turns)
        draws = None if all(row.is_greedy for row in rows) else buffers.draws(rows)
        edits = self._edits.upload(rows)
        token_ids, is_finite = self._backend.sample(logits, self._vocab_size, draws, edits)
        if edits is not None:
            self._backend.count_tokens(edits, token_ids, is_finite)
        logprobs = queue_logprobs(logits, self._vocab_size, rows, token_ids, self._accelerator)
        on_device = torch.where(is_finite, token_ids, _NOT_FINITE)
        on_host = buffers.chosen[: len(rows)]
        return QueuedTokens(on_device, on_host, self._accelerator.copy_back(on_device, on_host), logprobs)


class _Buffers:
    """What one batch needs in page-locked memory."""

    def __init__(self, accelerator: Accelerator, max_num_rows: int) -> None:
        dtypes = (np.float64, np.float64, np.float64, np.int64, np.int64, np.int32)
        self._parameters = StepBuffers([BufferSpec((max_num_rows,), dtype) for dtype in dtypes], accelerator)
        self.chosen = accelerator.host_buffer(max_num_rows * torch.int64.itemsize).view(torch.int64)

    def draws(self, rows: Sequence[SamplingRow]) -> DrawParams:
        """Their parameters, on the device for what is queued from now on."""
        num_rows = len(rows)
        temperature, top_p, log_min_p, seed, position, top_k = self._parameters.buffers
        self._parameters.wait()
        temperature.array[:num_rows] = [row.params.temperature for row in rows]
        top_p.array[:num_rows] = [row.params.top_p for row in rows]
        with np.errstate(divide="ignore"):
            log_min_p.array[:num_rows] = np.log([row.params.min_p for row in rows])
        seed.array[:num_rows] = np.array([row.seed & _UINT64_MASK for row in rows], np.uint64).view(np.int64)
        position.array[:num_rows] = [row.position for row in rows]
        top_k.array[:num_rows] = [row.params.top_k for row in rows]
        self._parameters.upload(top_k.end_bytes(num_rows))
        return DrawParams(
            temperature=temperature.tensor[:num_rows],
            top_k=top_k.tensor[:num_rows],
            top_p=top_p.tensor[:num_rows],
            log_min_p=log_min_p.tensor[:num_rows],
            seed=seed.tensor[:num_rows],
            position=position.tensor[:num_rows],
        )
