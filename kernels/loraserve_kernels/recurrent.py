"""What the ops with recurrent states share: their checks, and their plain walk over the sequences of a step."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from loraserve_kernels.checks import mismatch, require_dense
from loraserve_kernels.step_batch import Segments, StateSlots, StepBatch


class SequenceRows(NamedTuple):
    """A sequence's part of a step; slots are -1 where there are none."""

    first_row: int
    end_row: int
    read: int
    write: int
    save: int
    num_rows_saved: int


def check_state(name: str, state: Tensor, of_a_slot: tuple[int, ...], dtype: torch.dtype, batch: StepBatch) -> None:
    """Raise `ValueError` unless the state has that shape for each slot, and the batch says which slots it uses."""
    if tuple(state.shape[1:]) != of_a_slot:
        raise mismatch(name, list(state.shape), f"[num_slots, {', '.join(map(str, of_a_slot))}]")
    require_dense(name, state, dtype)
    slots = batch.state_slots
    if slots is None:
        raise mismatch("batch.state_slots", None, "slots, for an op with a state")
    num_sequences = batch.num_rows.shape[0]
    for column, tensor in (
        ("num_rows", batch.num_rows),
        ("row_start", batch.row_start),
        ("state_slots.read", slots.read),
        ("state_slots.write", slots.write),
        ("state_slots.save", slots.save),
        ("state_slots.num_rows_saved", slots.num_rows_saved),
    ):
        require_dense(column, tensor, torch.int32)
        if tensor.shape != (num_sequences,):
            raise mismatch(column, list(tensor.shape), f"[{num_sequences}], as num_rows")


def sequence_rows(batch: StepBatch, num_slots: int) -> Iterator[SequenceRows]:
    """The sequences of a batch, from tensors to host integers. Raises `ValueError` for a slot that does not exist."""
    slots = batch.state_slots
    assert slots is not None
    columns = (batch.row_start, batch.num_rows, slots.read, slots.write, slots.save, slots.num_rows_saved)
    for first, count, read, write, save, saved in zip(*(column.tolist() for column in columns), strict=True):
        if not (-1 <= read < num_slots and 0 <= write < num_slots and -1 <= save < num_slots):
            raise ValueError(f"a state slot of ({read}, {write}, {save}) is outside the {num_slots} slots")
        yield SequenceRows(first, first + count, read, write, save, saved)


def make_recurrent_batch(
    num_rows: list[int], device: str = "cpu", *, seed: int = 0, fresh: tuple[int, ...] = (0,), saved: bool = True
) -> tuple[StepBatch, int]:
    """(A batch of sequences with these numbers of rows and shuffled slots, its number of slots).

    fresh: sequences that start in this step. saved: all others also save a state, after about half of their rows.
    """
    generator = torch.Generator().manual_seed(seed)
    num_seqs = len(num_rows)
    num_slots = 3 * num_seqs + 2
    order = torch.randperm(num_slots, generator=generator).tolist()
    write = order[:num_seqs]
    read = [-1 if i in fresh else order[num_seqs + i] if i % 2 else write[i] for i in range(num_seqs)]
    save = [-1 if i in fresh or not saved else order[2 * num_seqs + i] for i in range(num_seqs)]
    return make_recurrent_step(num_rows, read, write, save, device), num_slots


def make_recurrent_step(
    num_rows: list[int], read: list[int], write: list[int], save: list[int], device: str = "cpu"
) -> StepBatch:
    """A batch of sequences with these numbers of rows and slots. States are saved after about half of the rows."""

    def int32(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    ends = torch.tensor(num_rows).cumsum(0).tolist()
    starts = [end - count for end, count in zip(ends, num_rows, strict=True)]
    total = sum(num_rows)
    rows = torch.arange(total, device=device)
    no_adapter = Segments(int32([0, total]), int32([-1]), has_adapter=False)
    return StepBatch(
        token_ids=rows,
        positions=rows,
        slot_mapping=rows,
        block_table=int32([0] * len(num_rows))[:, None],
        context_lens=int32(num_rows),
        row_start=int32(starts),
        num_rows=int32(num_rows),
        segments=no_adapter,
        sampled_rows=rows[:0],
        sampled_segments=no_adapter,
        state_slots=StateSlots(int32(read), int32(write), int32(save), int32([-(-count // 2) for count in num_rows])),
    )
