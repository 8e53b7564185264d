"""Turns the scheduler's plan into a `StepBatch`: flat int tensors in buffers that are allocated once."""

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from loraserve_kernels.step_batch import Run, Segments, StateSlots, StepBatch

from loraserve.engine.device.accelerator import Accelerator, upload_ids
from loraserve.engine.device.step_buffers import Buffer, BufferSpec, StepBuffers
from loraserve.engine.sampling.columns import DeviceSampling
from loraserve.engine.sampling.row import SamplingRow
from loraserve.engine.scheduling.plan import ScheduledSequence
from loraserve.engine.scheduling.sequence import Sequence


@dataclass(slots=True)
class BatchShape:
    """Determines a batch's tensors, except for the values that change with every step."""

    adapter_slots: list[int]
    num_rows: list[int]
    num_base_rows: list[int]
    num_sampled_rows: list[int]
    num_pooled_rows: list[int]
    has_own_tables: list[bool]


class BatchBuilder:
    """One batch at a time: building the next one overwrites the last.

    As long as the shape stays the same, as in decoding, the same `StepBatch` is returned with new values in it: torch
    operations cost more in a step than their number suggests, because the model's weights have evicted all code from
    the caches.
    """

    sampling: DeviceSampling | None = None
    """For the last batch, copied with it to a device that samples; None if it was built without `sampled`."""

    def __init__(
        self,
        max_num_rows: int,
        max_num_seqs: int,
        max_blocks: int,
        block_size: int,
        accelerator: Accelerator | None = None,
        lists: Seq[BufferSpec] = (),
        own_tables: Collection[int] = (),
        has_states: bool = False,
    ) -> None:
        """accelerator: the tensors are on its device. lists: further buffers, kept in `_lists`. own_tables: slots of
        adapters that have any, see `AdapterTable`. has_states: the model has recurrent states."""
        self._states = _StateBuffers(max_num_seqs) if has_states else None
        self._own_tables = own_tables
        self._block_size = block_size
        a_sequence = BufferSpec((max_num_seqs,), np.int32)
        a_segment = BufferSpec((2 * max_num_seqs,), np.int32)  # per sequence: rows without and with its adapter
        a_border = BufferSpec((2 * max_num_seqs + 1,), np.int32)
        a_row = BufferSpec((max_num_rows,), np.int64)
        a_table = BufferSpec((max_num_seqs, max_blocks), np.int32)
        self._buffers = StepBuffers(
            [*[a_sequence] * 3, *[a_segment] * 2, *[a_border] * 2, *[a_row] * 4, *lists, a_table],
            accelerator,
        )
        of_sequences, of_segments = self._buffers.buffers[:3], self._buffers.buffers[3:7]
        of_rows, self._lists = self._buffers.buffers[7:11], self._buffers.buffers[11:-1]
        self._context_lens, self._row_start, self._num_rows = of_sequences
        self._segment_slot, self._sampled_slot, self._segment_start, self._sampled_start = of_segments
        self._token_ids, self._positions, self._slot_mapping, self._sampled_rows = of_rows
        self._block_table = self._buffers.buffers[-1]
        self._shape = BatchShape([], [], [], [], [], [])
        self._batch: StepBatch | None = None
        """The last batch, of this shape."""
        self._in_table: list[tuple[int, int]] = []
        """Per row of the block table: `Sequence.admitted` of the sequence whose blocks it holds, and the last of these
        blocks."""

    def build(self, scheduled: Seq[ScheduledSequence], sampled: Seq[SamplingRow] = ()) -> StepBatch:
        """`scheduled` must be ordered by adapter slot. sampled: the rows to sample, if they are known before the step;
        only a device needs them."""
        self._fill(scheduled)
        return self._filled(scheduled)

    def build_again(self, scheduled: Seq[ScheduledSequence]) -> StepBatch:
        """As `build`, for the last batch's sequences in the same order, one row each in both: for the next token."""
        batch, size, num_rows = self._batch, self._block_size, len(scheduled)
        assert batch is not None
        sequences = [item.sequence for item in scheduled]
        positions = [each.num_computed_tokens for each in sequences]
        self._token_ids.array[:num_rows] = [each.token_ids[-1] for each in sequences]
        self._positions.array[:num_rows] = positions
        self._slot_mapping.array[:num_rows] = [
            each.blocks[position // size] * size + position % size
            for each, position in zip(sequences, positions, strict=True)
        ]
        self._context_lens.array[:num_rows] = [position + 1 for position in positions]
        for i, position in enumerate(positions):
            if position % size == 0:
                self._in_table[i] = self._fill_block_table(i, sequences[i], position, position + 1)
        if self._states is not None:
            self._states.fill(scheduled)
        return batch

    def _filled(self, scheduled: Seq[ScheduledSequence]) -> StepBatch:
        """The batch whose values are in the buffers; a new one if the shape has changed."""
        shape = BatchShape(
            [item.sequence.adapter_slot for item in scheduled],
            [item.num_rows for item in scheduled],
            [item.num_base_rows for item in scheduled],
            [item.num_sampled_rows for item in scheduled],
            [item.num_pooled_rows for item in scheduled],
            [item.sequence.adapter_slot in self._own_tables for item in scheduled] if self._own_tables else [],
        )
        if self._batch is None or shape != self._shape:
            self._shape, self._batch = shape, self._make_batch(shape)
        return self._batch

    def _fill(self, scheduled: Seq[ScheduledSequence]) -> None:
        """Fill in the values that change with every step.

        Collects them in lists first: single elements of a numpy array take ten times as long. A token that is not known
        yet is filled in as 0.
        """
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        context_lens: list[int] = []
        in_table: list[tuple[int, int]] = []
        size, was_in_table, num_in_table = self._block_size, self._in_table, len(self._in_table)
        for i, item in enumerate(scheduled):
            sequence, num_rows = item.sequence, item.num_rows
            start = sequence.num_computed_tokens
            end = start + num_rows
            context_lens.append(end)
            if num_rows == 1:
                known, block = sequence.token_ids, sequence.blocks[start // size]
                token_ids.append(known[start] if start < len(known) else 0)
                positions.append(start)
                slots.append(block * size + start % size)
                last = (sequence.admitted, block)
                if i >= num_in_table or was_in_table[i] != last or sequence.admitted == 0:
                    last = self._fill_block_table(i, sequence, start, end)
                in_table.append(last)
            else:
                in_table.append(self._fill_block_table(i, sequence, start, end))
                token_ids += sequence.token_ids[start:end]
                token_ids += item.draft
                positions += range(start, end)
                slots += self._slots(sequence, start, end)
        self._in_table = in_table
        num_rows = len(token_ids)
        self._token_ids.array[:num_rows] = token_ids
        self._positions.array[:num_rows] = positions
        self._slot_mapping.array[:num_rows] = slots
        self._context_lens.array[: len(context_lens)] = context_lens
        if self._states is not None:
            self._states.fill(scheduled)

    def _fill_block_table(self, i: int, sequence: Sequence, start: int, end: int) -> tuple[int, int]:
        """Fill row i for tokens up to `end`. Returns its entry for `_in_table`."""
        # NOTE: from one batch to the next, a running sequence's blocks before its first row to compute do not change.
        # They are not filled in again, so that a step costs the same however long the context is.
        blocks, size = sequence.blocks, self._block_size
        was_here = sequence.admitted > 0 and i < len(self._in_table) and self._in_table[i][0] == sequence.admitted
        first_block, num_blocks = start // size if was_here else 0, (end - 1) // size + 1
        self._block_table.array[i, first_block:num_blocks] = blocks[first_block:num_blocks]
        return sequence.admitted, blocks[num_blocks - 1]

    def _slots(self, sequence: Sequence, start: int, end: int) -> list[int]:
        positions = np.arange(start, end)
        first_block = start // self._block_size
        blocks = np.array(sequence.blocks[first_block : (end - 1) // self._block_size + 1])
        return (
            blocks[positions // self._block_size - first_block] * self._block_size + positions % self._block_size
        ).tolist()

    def _make_batch(self, shape: BatchShape) -> StepBatch:
        """Also fills in the values that are the same in every step of this shape."""
        num_rows, num_seqs = sum(shape.num_rows), len(shape.num_rows)
        row_end = np.cumsum(shape.num_rows, dtype=np.int64)
        self._num_rows.array[:num_seqs] = shape.num_rows
        self._row_start.array[:num_seqs] = row_end - shape.num_rows
        num_base_sampled = [
            max(sampled - (rows - base), 0)
            for rows, base, sampled in zip(shape.num_rows, shape.num_base_rows, shape.num_sampled_rows, strict=True)
        ]
        sampled_rows = _last_rows(row_end.tolist(), shape.num_sampled_rows)
        pooled_rows = _last_rows(row_end.tolist(), shape.num_pooled_rows)
        self._sampled_rows.array[: len(sampled_rows)] = sampled_rows
        segments = _fill_segments(
            shape.adapter_slots, shape.num_rows, shape.num_base_rows, self._segment_start, self._segment_slot
        )
        sampled_segments = _fill_segments(
            shape.adapter_slots, shape.num_sampled_rows, num_base_sampled, self._sampled_start, self._sampled_slot
        )
        if any(shape.has_own_tables):
            segments.own_table_runs = _own_table_runs(shape, shape.num_rows)
            sampled_segments.own_table_runs = _own_table_runs(shape, shape.num_sampled_rows)
        return StepBatch(
            token_ids=self._token_ids.tensor[:num_rows],
            positions=self._positions.tensor[:num_rows],
            slot_mapping=self._slot_mapping.tensor[:num_rows],
            block_table=self._block_table.tensor[:num_seqs],
            context_lens=self._context_lens.tensor[:num_seqs],
            row_start=self._row_start.tensor[:num_seqs],
            num_rows=self._num_rows.tensor[:num_seqs],
            segments=segments,
            sampled_rows=self._sampled_rows.tensor[: len(sampled_rows)],
            sampled_segments=sampled_segments,
            pooled_rows=upload_ids(pooled_rows, self._token_ids.tensor.device) if pooled_rows else None,
            state_slots=None if self._states is None else self._states.slots(num_seqs),
        )


class _StateBuffers:
    """Of `StateSlots`, on the host."""

    def __init__(self, max_num_seqs: int) -> None:
        self._buffers = StepBuffers([BufferSpec((max_num_seqs,), np.int32)] * 4, None).buffers

    def fill(self, scheduled: Seq[ScheduledSequence]) -> None:
        read, write, save, num_rows_saved = self._buffers
        count = len(scheduled)
        slots = [item.sequence.state_slot for item in scheduled]
        write.array[:count] = slots
        read.array[:count] = [
            slot if item.sequence.num_computed_tokens > 0 else -1 for item, slot in zip(scheduled, slots, strict=True)
        ]
        save.array[:count] = [item.save_slot for item in scheduled]
        num_rows_saved.array[:count] = [item.num_rows_saved for item in scheduled]

    def slots(self, num_seqs: int) -> StateSlots:
        read, write, save, num_rows_saved = (buffer.tensor[:num_seqs] for buffer in self._buffers)
        return StateSlots(read, write, save, num_rows_saved)


def _own_table_runs(shape: BatchShape, num_rows: Seq[int]) -> tuple[Run, ...]:
    """Of sequences ordered by slot, whose adapters have no base rows. num_rows: of each, perhaps 0."""
    runs: list[Run] = []
    end = 0
    for adapter_slot, has_own_tables, count in zip(shape.adapter_slots, shape.has_own_tables, num_rows, strict=True):
        first, end = end, end + count
        if not has_own_tables or count == 0:
            continue
        if runs and runs[-1].adapter_slot == adapter_slot:
            runs[-1] = runs[-1]._replace(end_row=end)
        else:
            runs.append(Run(adapter_slot, first, end))
    return tuple(runs)


def _last_rows(row_end: Seq[int], counts: Seq[int]) -> list[int]:
    """The last `count` rows of each sequence."""
    return [row for end, count in zip(row_end, counts, strict=True) for row in range(end - count, end)]


def _fill_segments(
    adapter_slots: Seq[int], num_rows: Seq[int], num_base_rows: Seq[int], start: Buffer, slot: Buffer
) -> Segments:
    """Segments of sequences ordered by slot. num_base_rows: each one's first rows, which use the base model anyway.

    Neighboring rows with the same slot are one segment.
    """
    num_segments = 0
    end = 0
    has_adapter = False
    for adapter_slot, count, base in zip(adapter_slots, num_rows, num_base_rows, strict=True):
        for used_slot, num_used in ((-1, base), (adapter_slot, count - base)):
            if num_used == 0:
                continue
            if num_segments == 0 or slot.array[num_segments - 1] != used_slot:
                start.array[num_segments] = end
                slot.array[num_segments] = used_slot
                num_segments += 1
                has_adapter = has_adapter or used_slot >= 0
            end += num_used
    start.array[num_segments] = end
    return Segments(start.tensor[: num_segments + 1], slot.tensor[:num_segments], has_adapter)
