"""Turns the scheduler's plan into a `StepBatch`: flat int tensors in buffers that are allocated once."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from loraserve_kernels.step_batch import Segments, StepBatch
from torch import Tensor

from loraserve.engine.sequence import Sequence


@dataclass(slots=True)
class ScheduledSequence:
    """Compute `num_rows` tokens from `sequence.num_computed_tokens` on."""

    sequence: Sequence
    num_rows: int
    num_sampled_rows: int
    """Of the last rows: 1 when a token is to be sampled, more for prompt logprobs, 0 in the middle of a prompt."""


class _Buffer:
    """An int tensor and its numpy view; `filled(n)` is the tensor's first n elements."""

    __slots__ = ("array", "tensor")

    def __init__(self, shape: int | tuple[int, int], dtype: type[np.signedinteger]) -> None:
        self.array = np.zeros(shape, dtype)
        self.tensor: Tensor = torch.from_numpy(self.array)


class BatchBuilder:
    """One batch at a time: building the next one overwrites the last."""

    def __init__(self, max_num_rows: int, max_num_seqs: int, max_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._token_ids = _Buffer(max_num_rows, np.int64)
        self._positions = _Buffer(max_num_rows, np.int64)
        self._slot_mapping = _Buffer(max_num_rows, np.int64)
        self._sampled_rows = _Buffer(max_num_rows, np.int64)
        self._block_table = _Buffer((max_num_seqs, max_blocks), np.int32)
        self._context_lens = _Buffer(max_num_seqs, np.int32)
        self._row_start = _Buffer(max_num_seqs, np.int32)
        self._num_rows = _Buffer(max_num_seqs, np.int32)
        self._segment_start = _Buffer(max_num_seqs + 1, np.int32)
        self._segment_slot = _Buffer(max_num_seqs, np.int32)
        self._sampled_start = _Buffer(max_num_seqs + 1, np.int32)
        self._sampled_slot = _Buffer(max_num_seqs, np.int32)

    def build(self, scheduled: Seq[ScheduledSequence]) -> StepBatch:
        """`scheduled` must be ordered by adapter slot."""
        row = num_sampled = 0
        for i, item in enumerate(scheduled):
            self._fill_sequence(i, item, row, num_sampled)
            row += item.num_rows
            num_sampled += item.num_sampled_rows
        num_seqs = len(scheduled)
        segments = self._fill_segments(
            [(item.sequence.adapter_slot, item.num_rows) for item in scheduled],
            self._segment_start,
            self._segment_slot,
        )
        sampled_segments = self._fill_segments(
            [(item.sequence.adapter_slot, item.num_sampled_rows) for item in scheduled if item.num_sampled_rows],
            self._sampled_start,
            self._sampled_slot,
        )
        return StepBatch(
            token_ids=self._token_ids.tensor[:row],
            positions=self._positions.tensor[:row],
            slot_mapping=self._slot_mapping.tensor[:row],
            block_table=self._block_table.tensor[:num_seqs],
            context_lens=self._context_lens.tensor[:num_seqs],
            row_start=self._row_start.tensor[:num_seqs],
            num_rows=self._num_rows.tensor[:num_seqs],
            segments=segments,
            sampled_rows=self._sampled_rows.tensor[:num_sampled],
            sampled_segments=sampled_segments,
        )

    def _fill_sequence(self, i: int, item: ScheduledSequence, row: int, num_sampled: int) -> None:
        sequence, num_rows = item.sequence, item.num_rows
        start = sequence.num_computed_tokens
        end = start + num_rows
        table = self._block_table.array[i]
        num_blocks = -(-end // self._block_size)
        table[:num_blocks] = sequence.blocks[:num_blocks]
        self._context_lens.array[i] = end
        self._row_start.array[i] = row
        self._num_rows.array[i] = num_rows
        if num_rows == 1:
            self._token_ids.array[row] = sequence.token_ids[start]
            self._positions.array[row] = start
            self._slot_mapping.array[row] = (
                sequence.blocks[start // self._block_size] * self._block_size + start % self._block_size
            )
        else:
            rows = slice(row, row + num_rows)
            positions = np.arange(start, end)
            self._token_ids.array[rows] = sequence.token_ids[start:end]
            self._positions.array[rows] = positions
            self._slot_mapping.array[rows] = (
                table[positions // self._block_size].astype(np.int64) * self._block_size + positions % self._block_size
            )
        if item.num_sampled_rows:
            last = row + num_rows
            self._sampled_rows.array[num_sampled : num_sampled + item.num_sampled_rows] = np.arange(
                last - item.num_sampled_rows, last
            )

    @staticmethod
    def _fill_segments(runs: Seq[tuple[int, int]], start: _Buffer, slot: _Buffer) -> Segments:
        """runs: (adapter slot, rows) of each sequence, ordered by slot; neighbours of one slot are joined."""
        num_segments = 0
        end = 0
        has_adapter = False
        for adapter_slot, num_rows in runs:
            if num_segments == 0 or slot.array[num_segments - 1] != adapter_slot:
                start.array[num_segments] = end
                slot.array[num_segments] = adapter_slot
                num_segments += 1
                has_adapter = has_adapter or adapter_slot >= 0
            end += num_rows
        start.array[num_segments] = end
        return Segments(start.tensor[: num_segments + 1], slot.tensor[:num_segments], has_adapter)
