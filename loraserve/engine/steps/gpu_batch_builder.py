"""Batches for a GPU: moved in one copy, with the kernels' work lists, and padded to the size of a captured graph."""

from collections.abc import Collection
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
from loraserve_kernels.step_batch import Segments, StepBatch

from loraserve.engine.device.accelerator import Accelerator
from loraserve.engine.device.step_buffers import BufferSpec
from loraserve.engine.sampling.columns import SamplingColumns
from loraserve.engine.sampling.device_sampler import QueuedTokens
from loraserve.engine.sampling.row import SamplingRow
from loraserve.engine.scheduling.plan import ScheduledSequence
from loraserve.engine.scheduling.sequence import Sequence
from loraserve.engine.steps.batch_builder import BatchBuilder, BatchShape
from loraserve.engine.steps.graphs import GraphSize, GraphSizes
from loraserve.engine.steps.work_lists import WorkLists

REBALANCE_STEPS = 32
"""Steps until attention lists are rebuilt: for longer contexts they stay correct, but become less and less balanced."""


class BatchSize(NamedTuple):
    num_rows: int
    num_seqs: int
    num_sampled: int


class GpuBatchBuilder(BatchBuilder):
    """A batch is in device memory for everything queued after `build`."""

    def __init__(
        self,
        max_num_rows: int,
        max_num_seqs: int,
        max_blocks: int,
        block_size: int,
        accelerator: Accelerator,
        work: WorkLists | None,
        graph_sizes: GraphSizes,
        own_tables: Collection[int] = (),
    ) -> None:
        """work: None for a backend that reads no lists. own_tables: as for `BatchBuilder`."""
        of_tokens = [BufferSpec((max_num_seqs,), np.int64)] * 2
        of_sampling = SamplingColumns.specs(max_num_seqs)
        lists = [*of_tokens, *of_sampling, *([] if work is None else work.specs)]
        super().__init__(max_num_rows, max_num_seqs, max_blocks, block_size, accelerator, lists, own_tables)
        self._chosen_rows, self._token_rows, *lists = self._lists
        self._all_rows = np.arange(max_num_seqs)
        self._columns = SamplingColumns(lists[: len(of_sampling)])
        if work is not None:
            work.use(lists[len(of_sampling) :])
        self._work = work
        self._graph_sizes = graph_sizes
        self._graph: GraphSize | None = None
        """Of the last batch; None if it is not computed by a graph."""
        self._num_steps = 0
        """Steps since the attention lists were made."""
        self._listed: list[int] = []
        """`Sequence.admitted` of the sequences that the lists were made for."""

    def build(self, scheduled: Seq[ScheduledSequence], sampled: Seq[SamplingRow] = ()) -> StepBatch:
        self._buffers.wait()
        self.sampling = self._columns.fill(sampled) if sampled else None
        return super().build(scheduled)

    def build_ahead(
        self,
        scheduled: Seq[ScheduledSequence],
        tokens: QueuedTokens,
        chosen_rows: Seq[int | None],
        sampled: Seq[SamplingRow] = (),
    ) -> StepBatch:
        """Build a batch while the step before it is still choosing some of its tokens.

        chosen_rows: for each sequence, the row of `tokens` that its only row takes its token from; None if its tokens
        are known.

        NOTE: that step may still be running and reading the tensors. They get their new values later in the same
        stream. The host arrays may be written once that step's own batch was copied, which happened when the step
        before it ended; so waiting for that copy only waits for a step that was already collected.
        """
        self._buffers.wait()
        unknown: list[int] = []
        token_rows: list[int] = []
        row = 0
        for item, chosen_row in zip(scheduled, chosen_rows, strict=True):
            if chosen_row is not None:
                unknown.append(chosen_row)
                token_rows.append(row)
            row += item.num_rows
        num_unknown = len(unknown)
        self._chosen_rows.array[:num_unknown] = unknown
        self._token_rows.array[:num_unknown] = token_rows
        batch = self.build(scheduled, sampled)
        if num_unknown:
            chosen, rows = self._chosen_rows.tensor[:num_unknown], self._token_rows.tensor[:num_unknown]
            tokens.copy_to(batch.token_ids, chosen, rows)
        return batch

    def build_again_ahead(
        self, scheduled: Seq[ScheduledSequence], tokens: QueuedTokens, sampled: Seq[SamplingRow]
    ) -> StepBatch:
        """As `build_ahead`, for the last batch's sequences in the same order, with one row each in both batches; that
        batch is still choosing their tokens. Nearly all values stay the same or grow by one."""
        batch, num_seqs = self._batch, len(scheduled)
        assert batch is not None
        self._buffers.wait()
        self.sampling = self._columns.fill(sampled)
        for of_rows in (self._positions, self._slot_mapping, self._context_lens):
            of_rows.array[:num_seqs] += 1
        positions = self._positions.array[:num_seqs]
        for row in np.flatnonzero(positions % self._block_size == 0).tolist():
            self._enter_block(row, scheduled[row].sequence, int(positions[row]) // self._block_size)
        self._chosen_rows.array[:num_seqs] = self._token_rows.array[:num_seqs] = self._all_rows[:num_seqs]
        self._upload(batch, is_listed=False)
        tokens.copy_to(batch.token_ids, self._chosen_rows.tensor[:num_seqs], self._token_rows.tensor[:num_seqs])
        return batch

    def _enter_block(self, row: int, sequence: Sequence, column: int) -> None:
        """Update the arrays for the block at `column` of the sequence's block table, which this row's token begins."""
        block = sequence.blocks[column]
        self._slot_mapping.array[row] = block * self._block_size
        self._block_table.array[row, column] = block
        self._in_table[row] = (sequence.admitted, block)

    def _filled(self, scheduled: Seq[ScheduledSequence]) -> StepBatch:
        """Also uploads the batch to the device."""
        previous = self._batch
        batch = super()._filled(scheduled)
        self._upload(batch, is_listed=batch is not previous)
        return batch

    def _upload(self, batch: StepBatch, *, is_listed: bool) -> None:
        """is_listed: the attention lists were just made for this batch."""
        self._num_steps += 1
        if not is_listed and (self._num_steps >= REBALANCE_STEPS or self._admitted() != self._listed):
            self._list_attention(batch)
        self._buffers.upload(self._block_table.end_bytes(len(batch.context_lens)))

    def graph_batch(self, size: GraphSize, has_adapter: bool) -> StepBatch:
        """A batch of this size, all of it padding, to capture a graph with.

        Later batches have their values in the same tensors.
        """
        self._buffers.wait()
        self._batch = None
        self._pad(BatchSize(0, 0, 0), size)
        num_rows, num_seqs = size.num_rows, size.num_seqs
        no_start = np.zeros(1, np.int32)
        segments = Segments(self._segment_start.tensor[:2], self._segment_slot.tensor[:1], has_adapter)
        sampled = Segments(self._sampled_start.tensor[:2], self._sampled_slot.tensor[:1], has_adapter)
        batch = StepBatch(
            token_ids=self._token_ids.tensor[:num_rows],
            positions=self._positions.tensor[:num_rows],
            slot_mapping=self._slot_mapping.tensor[:num_rows],
            block_table=self._block_table.tensor[:num_seqs],
            context_lens=self._context_lens.tensor[:num_seqs],
            row_start=self._row_start.tensor[:num_seqs],
            num_rows=self._num_rows.tensor[:num_seqs],
            segments=segments,
            sampled_rows=self._sampled_rows.tensor[:num_seqs],
            sampled_segments=sampled,
        )
        if self._work is not None:
            no_sequence = self._context_lens.array[:0]
            batch.attention = self._work.attention(no_sequence, no_sequence, size)
            no_segment = self._segment_slot.array[:0]
            segments.tiles = self._work.lora(no_start, no_segment, num_rows, num_seqs)
            sampled.tiles = self._work.sampled_lora(no_start, no_segment, num_seqs, num_seqs)
        self._buffers.upload(self._block_table.end_bytes(0))
        return batch

    def _make_batch(self, shape: BatchShape) -> StepBatch:
        batch = super()._make_batch(shape)
        size = BatchSize(len(batch.token_ids), len(batch.context_lens), len(batch.sampled_rows))
        self._graph = None if batch.needs_modules else self._graph_sizes.of(*size)
        if self._graph is not None:
            self._pad(size, self._graph)
        if self._work is not None:
            self._list_attention(batch)
            self._list_lora(batch)
        return batch

    def _list_attention(self, batch: StepBatch) -> None:
        if self._work is None:
            return
        num_seqs = len(batch.context_lens)
        context_lens, num_rows = self._context_lens.array[:num_seqs], self._num_rows.array[:num_seqs]
        batch.attention = self._work.attention(context_lens, num_rows, self._graph)
        self._num_steps, self._listed = 0, self._admitted()

    def _admitted(self) -> list[int]:
        return [admitted for admitted, _ in self._in_table]

    def _list_lora(self, batch: StepBatch) -> None:
        assert self._work is not None
        segments, sampled = batch.segments, batch.sampled_segments
        if not segments.has_adapter:
            return
        start, slot = _used(self._segment_start.array, self._segment_slot.array, segments)
        sampled_start, sampled_slot = _used(self._sampled_start.array, self._sampled_slot.array, sampled)
        if self._graph is None:
            of_rows = len(batch.token_ids), int(np.count_nonzero(slot >= 0))
            of_sampled = len(batch.sampled_rows), int(np.count_nonzero(sampled_slot >= 0))
        else:
            num_seqs = self._graph.num_seqs
            of_rows, of_sampled = (self._graph.num_rows, num_seqs), (num_seqs, num_seqs)
        segments.tiles = self._work.lora(start, slot, *of_rows)
        # Even if none of these rows has an adapter: a graph reads the list.
        sampled.tiles = self._work.sampled_lora(sampled_start, sampled_slot, *of_sampled)

    def _pad(self, size: BatchSize, graph: GraphSize) -> None:
        """Fill rows that belong to no sequence: no K and V are written for them, and their outputs are not read."""
        rows = slice(size.num_rows, graph.num_rows)
        self._token_ids.array[rows] = 0
        self._positions.array[rows] = 0
        self._slot_mapping.array[rows] = -1
        self._sampled_rows.array[size.num_sampled : graph.num_seqs] = 0
        sequences = slice(size.num_seqs, graph.num_seqs)
        self._context_lens.array[sequences] = 0
        self._row_start.array[sequences] = 0
        self._num_rows.array[sequences] = 0


def _used(start: np.ndarray, adapter_slot: np.ndarray, segments: Segments) -> tuple[np.ndarray, np.ndarray]:
    num_segments = len(segments.adapter_slot)
    return start[: num_segments + 1], adapter_slot[:num_segments]
