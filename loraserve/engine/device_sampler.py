"""Tokens chosen where the logits are, one copy to the host for a whole batch."""

from collections.abc import Sequence

import numpy as np
import torch
from loraserve_kernels.sampling import DrawParams, SamplesOnDevice
from torch import Tensor

from loraserve.engine.accelerator import Accelerator
from loraserve.engine.sampling_row import SamplingRow
from loraserve.engine.step_buffers import BufferSpec, StepBuffers

_UINT64_MASK = (1 << 64) - 1
_NOT_FINITE = -1


class DeviceSampler:
    """For rows without edits and log-probabilities; draws are those of `token_choice`, but for rounding."""

    def __init__(self, backend: SamplesOnDevice, accelerator: Accelerator, vocab_size: int, max_num_rows: int) -> None:
        self._backend = backend
        self._vocab_size = vocab_size
        dtypes = (np.float64, np.float64, np.float64, np.int64, np.int64, np.int32)
        self._buffers = StepBuffers([BufferSpec((max_num_rows,), dtype) for dtype in dtypes], accelerator)

    @staticmethod
    def takes(row: SamplingRow) -> bool:
        """Whether it can choose for this row. Does not depend on any other row."""
        return not row.has_edits and row.params.logprobs is None

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> tuple[list[int], list[bool]]:
        """(token ids, are finite) of logits [R, at least vocab_size]; rows it does not take get any token."""
        draws = None if all(row.is_greedy for row in rows) else self._draws(rows)
        token_ids, is_finite = self._backend.sample(logits, self._vocab_size, draws, None)
        chosen = torch.where(is_finite, token_ids, _NOT_FINITE).tolist()
        return [max(token_id, 0) for token_id in chosen], [token_id != _NOT_FINITE for token_id in chosen]

    def _draws(self, rows: Sequence[SamplingRow]) -> DrawParams:
        num_rows = len(rows)
        temperature, top_p, log_min_p, seed, position, top_k = self._buffers.buffers
        self._buffers.wait()
        temperature.array[:num_rows] = [row.params.temperature for row in rows]
        top_p.array[:num_rows] = [row.params.top_p for row in rows]
        with np.errstate(divide="ignore"):
            log_min_p.array[:num_rows] = np.log([row.params.min_p for row in rows])
        seed.array[:num_rows] = np.array([row.seed & _UINT64_MASK for row in rows], np.uint64).view(np.int64)
        position.array[:num_rows] = [row.position for row in rows]
        top_k.array[:num_rows] = [row.params.top_k for row in rows]
        self._buffers.upload(top_k.end_bytes(num_rows))
        return DrawParams(
            temperature=temperature.tensor[:num_rows],
            top_k=top_k.tensor[:num_rows],
            top_p=top_p.tensor[:num_rows],
            log_min_p=log_min_p.tensor[:num_rows],
            seed=seed.tensor[:num_rows],
            position=position.tensor[:num_rows],
        )
