"""Work lists for the GPU kernels, filled on the host in a step's buffers."""

from collections.abc import Sequence

import numpy as np
from loraserve_kernels.attention_work import (
    FEW_ROWS,
    AttentionWork,
    append_capacity,
    decode_capacity,
    fill_append_splits,
    fill_decode_splits,
    fill_prefill_tiles,
    prefill_capacity,
    rows_of_lists,
)
from loraserve_kernels.lora_tiles import DECODE_MAX_ROWS, EXPAND_MAX_ROWS, fill_tiles, tile_capacity
from torch import Tensor

from loraserve.engine.device.step_buffers import Buffer, BufferSpec
from loraserve.engine.steps.graphs import GraphSize


class WorkLists:
    """Lists in buffers of `specs`. The length of each list follows from the batch's shape alone."""

    def __init__(self, max_num_rows: int, max_num_seqs: int, max_context: int, num_splits: int) -> None:
        """num_splits: from `attention_work.splits_for_device`."""
        self._max_context = max_context
        self._num_splits = num_splits
        num_decode = decode_capacity(max_num_seqs, max_context, num_splits)
        num_append = append_capacity(max_num_rows, max_num_seqs, max_context, num_splits)
        num_prefill = prefill_capacity(max_num_rows, max_num_seqs)
        largest_of_a_kind = (EXPAND_MAX_ROWS, DECODE_MAX_ROWS, max_num_rows)
        num_tiles = max(tile_capacity(min(num_rows, max_num_rows), max_num_seqs) for num_rows in largest_of_a_kind)
        shapes = ((num_decode, 4), (num_append, 4), (num_prefill, 3), (num_tiles, 6), (num_tiles, 6))
        self.specs = [BufferSpec(shape, np.int32) for shape in shapes]

    def use(self, buffers: Sequence[Buffer]) -> None:
        """buffers: as in `specs`."""
        self._decode, self._append, self._prefill, self._tiles, self._sampled_tiles = buffers

    def attention(self, context_lens: np.ndarray, num_rows: np.ndarray, graph: GraphSize | None) -> AttentionWork:
        """context_lens, num_rows: per sequence, as in `StepBatch`. graph: makes the lists as long as any step of this
        graph may need."""
        max_context, num_splits = self._max_context, self._num_splits
        if graph is None:
            appended, prefilled = rows_of_lists(num_rows)
            num_lone = len(num_rows) - len(appended) - len(prefilled)
            of_append = int(appended.sum()), len(appended)
            of_prefill = int(prefilled.sum()), len(prefilled)
        else:
            num_lone, of_append, of_prefill = graph.num_seqs, (0, 0), (0, 0)
            if not graph.is_decode:
                of_append = graph.num_rows, graph.num_seqs
            if graph.num_rows > FEW_ROWS and not graph.is_decode:
                of_prefill = of_append
        num_decode = decode_capacity(num_lone, max_context, num_splits)
        num_append = append_capacity(*of_append, max_context, num_splits)
        num_prefill = prefill_capacity(*of_prefill)
        fill_decode_splits(self._decode.array[:num_decode], context_lens, num_rows, num_splits)
        fill_append_splits(self._append.array[:num_append], context_lens, num_rows, num_splits)
        fill_prefill_tiles(self._prefill.array[:num_prefill], context_lens, num_rows)
        return AttentionWork(
            self._decode.tensor[:num_decode], self._append.tensor[:num_append], self._prefill.tensor[:num_prefill]
        )

    def lora(self, start: np.ndarray, adapter_slot: np.ndarray, num_rows: int, max_segments: int) -> Tensor:
        """`Segments.tiles` for the batch's rows, as many as max_segments segments may need.

        num_rows: of the tensors that the kernels will get; for a padded batch, more than the segments'.
        """
        return _fill_tiles(self._tiles, start, adapter_slot, num_rows, max_segments)

    def sampled_lora(self, start: np.ndarray, adapter_slot: np.ndarray, num_rows: int, max_segments: int) -> Tensor:
        """The same for the sampled rows."""
        return _fill_tiles(self._sampled_tiles, start, adapter_slot, num_rows, max_segments)


def _fill_tiles(
    buffer: Buffer, start: np.ndarray, adapter_slot: np.ndarray, num_rows: int, max_segments: int
) -> Tensor:
    num_tiles = tile_capacity(num_rows, max_segments)
    fill_tiles(buffer.array[:num_tiles], start, adapter_slot, num_rows)
    return buffer.tensor[:num_tiles]
