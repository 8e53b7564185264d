"""What the tests of all ops with recurrent states share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from loraserve_kernels.recurrent import SequenceRows, make_recurrent_step, sequence_rows
from loraserve_kernels.step_batch import StateSlots, StepBatch
from torch import Tensor

RAGGED = [1, 5, 33, 2, 70]
"""Rows of sequences: shorter and longer than a block of rows."""


def slots_of(batch: StepBatch) -> StateSlots:
    assert batch.state_slots is not None
    return batch.state_slots


def expected_states(state: Tensor, batch: StepBatch, run: Callable[[SequenceRows, Tensor], list[Tensor]]) -> Tensor:
    """The float64 states after the step.

    run: from a sequence and its state before the first row to its states after each row.
    """
    after = state.double()
    for rows in sequence_rows(batch, len(state)):
        before = torch.zeros_like(after[0]) if rows.read < 0 else state[rows.read].double()
        found = run(rows, before)
        if rows.save >= 0:
            after[rows.save] = found[rows.num_rows_saved - 1]
        after[rows.write] = found[-1] if found else before
    return after


def require_unchanged(state: Tensor, before: Tensor, batch: StepBatch) -> None:
    """Slots that no sequence writes hold the same bits as before, NaNs included."""
    slots = slots_of(batch)
    others = torch.ones(len(state), dtype=torch.bool)
    others[slots.write.long().cpu()] = False
    others[slots.save[slots.save >= 0].long().cpu()] = False
    assert others.any()
    assert same_bits(state.cpu()[others], before.cpu()[others])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    yield
    torch.set_num_threads(before)


Step = Callable[[slice, StepBatch, Tensor], Tensor]
"""Runs an op on some rows of its inputs and a state."""


def require_same_bits_in_any_batch(step: Step, state: Tensor) -> None:
    """One sequence of 40 rows: alone, in several steps, among other sequences, on one thread and on eight.

    step: of an op with inputs of 60 rows. state: 8 slots, of which 0 to 2 are read.
    """
    one_step = state.clone()
    expected = step(slice(0, 40), make_recurrent_step([40], [0], [4], [5]), one_step)
    for ends in ([40], [1, 40], [13, 14, 39, 40]):
        states, read, start, found = state.clone(), 0, 0, []
        for end in ends:
            found.append(step(slice(start, end), make_recurrent_step([end - start], [read], [4], [-1]), states))
            start, read = end, 4
        assert same_bits(torch.cat(found), expected)
        assert same_bits(states[4], one_step[4])
    for num_threads in (1, 8):
        with torch_threads(num_threads):
            states = state.clone()
            batch = make_recurrent_step([40, 1, 19], [0, 1, -1], [4, 1, 6], [5, -1, 7])
            assert same_bits(step(slice(0, 60), batch, states)[:40], expected)
            assert same_bits(states[4:6], one_step[4:6])


BAD_STEPS = {
    "read": lambda batch: replace(batch, state_slots=changed(batch, "read", 8)),
    "read below -1": lambda batch: replace(batch, state_slots=changed(batch, "read", -2)),
    "write": lambda batch: replace(batch, state_slots=changed(batch, "write", 8)),
    "write -1": lambda batch: replace(batch, state_slots=changed(batch, "write", -1)),
    "save": lambda batch: replace(batch, state_slots=changed(batch, "save", 8)),
    "saved after no row": lambda batch: replace(batch, state_slots=changed(batch, "num_rows_saved", 0)),
    "saved after too many rows": lambda batch: replace(batch, state_slots=changed(batch, "num_rows_saved", 3)),
    "row_start": lambda batch: replace(batch, row_start=batch.row_start + 1),
    "row_start below 0": lambda batch: replace(batch, row_start=batch.row_start - 1),
    "num_rows below 0": lambda batch: replace(batch, num_rows=batch.num_rows * torch.tensor([1, -1]).int()),
}
"""What is wrong with a batch of 4 and 2 rows in 8 slots, the second sequence saving a state."""


def changed(batch: StepBatch, name: str, value: int) -> StateSlots:
    column = getattr(slots_of(batch), name).clone()
    column[1] = value
    return replace(slots_of(batch), **{name: column})


def require_refused(step: Step, state: Tensor, name: str) -> None:
    """The step raises and writes nothing. state: 8 slots."""
    batch, before = make_recurrent_step([4, 2], [0, 1], [2, 3], [-1, 4]), state.clone()
    with pytest.raises(ValueError, match="row ranges" if "row_start" in name or "num_rows" in name else "state slot"):
        step(slice(0, 6), BAD_STEPS[name](batch), state)
    assert same_bits(state, before)
