"""The edits of a batch's rows of logits as tensors, with one copy to the device for all of them."""

from collections.abc import Sequence
from itertools import cycle

import numpy as np
from loraserve_kernels.logit_edits import ListedTokens, LogitEdits

from loraserve.engine.device.accelerator import Accelerator
from loraserve.engine.device.step_buffers import BufferSpec, StepBuffers
from loraserve.engine.sampling.logit_edits import listed_tokens
from loraserve.engine.sampling.row import SamplingRow
from loraserve.engine.sampling.token_counts import TokenCounts

_FIRST_CAPACITY = 1024
"""How many tokens a batch's rows may list before its buffers grow."""


class DeviceLogitEdits:
    """For batches in the order in which they are queued."""

    def __init__(self, accelerator: Accelerator, vocab_size: int, max_num_rows: int) -> None:
        self._vocab_size = vocab_size
        self._counts = TokenCounts(accelerator.device, vocab_size, max_num_rows)
        # NOTE: two, as in `DeviceSampler`.
        self._turns = cycle([_EditBuffers(accelerator, max_num_rows) for _ in range(2)])

    def upload(self, rows: Sequence[SamplingRow]) -> LogitEdits | None:
        """The rows' edits, on the device for work queued from now on; None if no row has edits.

        The caller must count the tokens that are chosen with them.
        """
        if not any(row.has_edits for row in rows):
            return None
        listed = [listed_tokens(row, self._vocab_size) for row in rows]
        return next(self._turns).upload(rows, listed, self._counts)


class _EditBuffers:
    """Page-locked memory for one batch."""

    def __init__(self, accelerator: Accelerator, max_num_rows: int) -> None:
        self._accelerator = accelerator
        self._max_num_rows = max_num_rows
        self._make(_FIRST_CAPACITY)

    def _make(self, capacity: int) -> None:
        num_rows = self._max_num_rows
        of_rows = (np.int8, np.int8, np.float32, np.float32, np.float64, np.int32)
        of_listed = (np.int32, np.float32, np.int8)
        self._capacity = capacity
        self._storage = StepBuffers(
            [
                *(BufferSpec((num_rows,), dtype) for dtype in of_rows),
                BufferSpec((num_rows + 1,), np.int32),
                *(BufferSpec((capacity,), dtype) for dtype in of_listed),
            ],
            self._accelerator,
        )

    def upload(self, rows: Sequence[SamplingRow], listed: Sequence[ListedTokens], counts: TokenCounts) -> LogitEdits:
        num_rows, starts = len(rows), np.cumsum([0, *(len(each.token_ids) for each in listed)])
        num_listed = int(starts[-1])
        if num_listed > self._capacity:
            self._make(1 << (num_listed - 1).bit_length())
        self._storage.wait()
        is_edited, is_blank, repetition, frequency, presence, count_row, start, *columns = self._storage.buffers
        token_ids, biases, marks = columns
        is_blank.array[:num_rows] = [bool(row.params.allowed_token_ids) for row in rows]
        repetition.array[:num_rows] = [row.params.repetition_penalty for row in rows]
        frequency.array[:num_rows] = [row.params.frequency_penalty for row in rows]
        presence.array[:num_rows] = [row.params.presence_penalty for row in rows]
        count_row.array[:num_rows] = counts.count_rows(rows)
        start.array[: num_rows + 1] = starts
        is_edited.array[:num_rows] = [row.has_edits for row in rows]
        if num_listed:
            np.concatenate([each.token_ids for each in listed], out=token_ids.array[:num_listed])
            np.concatenate([each.biases for each in listed], out=biases.array[:num_listed])
            np.concatenate([each.marks for each in listed], out=marks.array[:num_listed])
        self._storage.upload(marks.end_bytes(num_listed) if num_listed else start.end_bytes(num_rows + 1))
        return LogitEdits(
            is_edited=is_edited.tensor[:num_rows],
            is_blank=is_blank.tensor[:num_rows],
            start=start.tensor[: num_rows + 1],
            token_ids=token_ids.tensor[:num_listed],
            biases=biases.tensor[:num_listed],
            marks=marks.tensor[:num_listed],
            repetition=repetition.tensor[:num_rows],
            frequency=frequency.tensor[:num_rows],
            presence=presence.tensor[:num_rows],
            count_row=count_row.tensor[:num_rows],
            token_counts=counts.tensor,
        )
