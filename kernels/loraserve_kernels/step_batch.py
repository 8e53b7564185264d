"""The metadata of one engine step. Every op reads this and nothing else about the batch.

Rows are the tokens computed in the step, packed without padding: all rows of a sequence are adjacent, and
sequences are ordered by adapter slot, so the rows of one adapter form one contiguous segment, except for base rows in
between that precede the activation of an activated LoRA.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from loraserve_kernels.attention_work import AttentionWork
from loraserve_kernels.draw import Draw


class Run(NamedTuple):
    """Adjacent rows with the same adapter; `end_row` is not one of them."""

    adapter_slot: int
    first_row: int
    end_row: int


@dataclass(slots=True)
class Segments:
    """Contiguous runs of rows that use the same adapter; together they cover all rows, in order."""

    start: Tensor
    """int32 [num_segments + 1]: first row of each segment; the last entry is the number of rows."""
    adapter_slot: Tensor
    """int32 [num_segments]: row of the `AdapterTable`, -1 = base model."""
    has_adapter: bool
    """False if every segment is the base model: LoRA ops return at once."""
    tiles: Tensor | None = None
    """int32 [num_tiles, 6]: two lists of (adapter_slot, first_row, end_row) of the adapters' rows, without base rows. A
    tile of the first has at most `lora_tiles.tile_rows` rows of one adapter, of the second at most
    `lora_tiles.expand_tile_rows`; unused entries come last and are (-1, entries in use, 0). For pairs of tokens and
    experts, each pair is a tile, also in base rows, whose rank is 0. None = not built: only the GPU's ops read it; they
    then build it themselves, which waits for the GPU."""
    own_table_runs: tuple[Run, ...] = ()
    """The rows of adapters with own tables (`AdapterTable.own_tables`), as host integers, in order."""


@dataclass(slots=True)
class StateSlots:
    """Where the recurrent states of a step's S sequences are: rows of every state tensor.

    A sequence's state after some of its rows may also be saved, for other sequences that start with the same tokens.
    """

    read: Tensor
    """int32 [S]: the state before the sequence's first row; -1 = it starts here, from zeros."""
    write: Tensor
    """int32 [S]: the state after its last row. No two sequences write one slot, and none writes a slot that another
    reads."""
    save: Tensor
    """int32 [S]: written too, with the state after `num_rows_saved` rows; -1 = nothing is saved."""
    num_rows_saved: Tensor
    """int32 [S]: 1 to the sequence's number of rows, where `save` is not -1."""


@dataclass(slots=True)
class StepBatch:
    """T rows of S sequences, R of them sampled. Tensors are views of buffers that outlive the step."""

    token_ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T]."""
    slot_mapping: Tensor
    """int64 [T]: block_id * block_size + offset, where the row's K and V are written."""
    block_table: Tensor
    """int32 [S, max_blocks]: block ids of each sequence, in position order; entries past its end are undefined."""
    context_lens: Tensor
    """int32 [S]: tokens of each sequence in the KV cache after this step's rows are written."""
    row_start: Tensor
    """int32 [S]: first row of each sequence."""
    num_rows: Tensor
    """int32 [S]: rows of each sequence. Its last row is at position context_len - 1."""
    segments: Segments
    """Segments of the T rows."""
    sampled_rows: Tensor
    """int64 [R]: rows whose logits are wanted, ascending."""
    sampled_segments: Segments
    """Segments of the R sampled rows, for `lm_head`, which computes only those."""
    pooled_rows: Tensor | None = None
    """int64 [P]: rows whose last hidden states are wanted, ascending; None = no rows."""
    attention: AttentionWork | None = None
    """None = not built: only the GPU's attention reads it; it then builds its own, which waits for the GPU."""
    state_slots: StateSlots | None = None
    """None for a model without recurrent states."""
    draws: Sequence[Draw] = ()
    """Tokens that a `DecoderModel` may draw together with its logits; a draw's row is one of the R."""

    @property
    def needs_modules(self) -> bool:
        """Whether it needs hidden states, or adapters' own tables: neither a captured graph nor a `DecoderModel`
        computes with them."""
        return self.pooled_rows is not None or len(self.segments.own_table_runs) > 0
