"""The sampling parameters of a step's rows, as columns of buffers that are copied to a device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from loraserve_kernels.sampling import DrawParams
from torch import Tensor

from loraserve.engine.device.step_buffers import Buffer, BufferSpec
from loraserve.engine.sampling.row import SamplingRow

_UINT64_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class DeviceSampling:
    """A batch's sampling parameters, on the device after the next upload of the columns."""

    draws: DrawParams | None
    """None: all rows are greedy."""
    scored_rows: Tensor | None
    """int64: the rows that request log-probabilities; None if there are none."""


class SamplingColumns:
    """Columns in buffers that others own, copy and wait for."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        """buffers: of `specs`."""
        self._buffers = buffers
        self._draws: DrawParams | None = None
        """The last ones: the same tensors as long as the number of rows is the same."""

    @staticmethod
    def specs(max_num_rows: int) -> list[BufferSpec]:
        dtypes = (np.float64, np.float64, np.float64, np.int64, np.int64, np.int32, np.int64)
        return [BufferSpec((max_num_rows,), dtype) for dtype in dtypes]

    @property
    def end_bytes(self) -> int:
        """End of the columns in the storage of all buffers."""
        scored_rows = self._buffers[-1]
        return scored_rows.end_bytes(len(scored_rows.array))

    def fill(self, rows: Sequence[SamplingRow]) -> DeviceSampling:
        """Only once the buffers' previous values have been copied."""
        draws = None if all(row.is_greedy for row in rows) else self._fill_draws(rows)
        scored = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
        scored_rows = self._buffers[-1]
        scored_rows.array[: len(scored)] = scored
        return DeviceSampling(draws, scored_rows.tensor[: len(scored)] if scored else None)

    def _fill_draws(self, rows: Sequence[SamplingRow]) -> DrawParams:
        num_rows = len(rows)
        temperature, top_p, log_min_p, seed, position, top_k, _ = self._buffers
        temperature.array[:num_rows] = [row.params.temperature for row in rows]
        top_p.array[:num_rows] = [row.params.top_p for row in rows]
        with np.errstate(divide="ignore"):
            log_min_p.array[:num_rows] = np.log([row.params.min_p for row in rows])
        seed.array[:num_rows] = np.array([row.seed & _UINT64_MASK for row in rows], np.uint64).view(np.int64)
        position.array[:num_rows] = [row.position for row in rows]
        top_k.array[:num_rows] = [row.params.top_k for row in rows]
        if self._draws is None or len(self._draws.seed) != num_rows:
            self._draws = DrawParams(
                temperature=temperature.tensor[:num_rows],
                top_k=top_k.tensor[:num_rows],
                top_p=top_p.tensor[:num_rows],
                log_min_p=log_min_p.tensor[:num_rows],
                seed=seed.tensor[:num_rows],
                position=position.tensor[:num_rows],
            )
        return self._draws
