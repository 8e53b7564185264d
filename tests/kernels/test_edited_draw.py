"""Editing logits and choosing tokens in C against `sample_reference`, which edits and sorts whole rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from loraserve_kernels.cpu_backend import CpuBackend
from loraserve_kernels.draw import Draw
from loraserve_kernels.edited_draw import CountedTokens, EditedDraw
from loraserve_kernels.host_sampling import ReferenceSampling, SamplesOnHost
from loraserve_kernels.logit_edits import RowEdits, fill_token_counts, list_tokens, pack_edits
from loraserve_kernels.sampling import make_logits, pack_draws, sample_reference
from torch import Tensor

NUM_COLUMNS = 2501


@dataclass
class Row:
    """One row of a batch: the edits of its logits, its prompt and output tokens, and how its token is drawn."""

    edits: RowEdits
    prompt: Sequence[int] = ()
    outputs: Sequence[int] = ()
    choice: tuple[float, int, float, float] = (0.0, 0, 1.0, 0.0)  # temperature, top_k, top_p, min_p
    counted: CountedTokens | None = field(init=False)

    def __post_init__(self) -> None:
        distinct = np.array(list(dict.fromkeys([*self.prompt, *self.outputs, 9999])), np.int64)  # 9999 is outside
        counts = np.array([list(self.outputs).count(token_id) for token_id in distinct], np.float32)
        has_penalties = self.edits.count_row >= 0
        self.counted = CountedTokens(distinct, counts, len(distinct)) if has_penalties else None

    def draw(self, row: int) -> EditedDraw:
        return EditedDraw(
            Draw(row, *self.choice, 7 * row - 3, 1000 - row),
            bool(self.edits.allowed_token_ids),
            list_tokens(self.edits, NUM_COLUMNS),
            self.counted,
            self.edits.repetition,
            self.edits.frequency,
            self.edits.presence,
        )


ROWS = [
    Row(RowEdits(bias={3: 40.0, 2500: 39.0, 9999: 80.0})),
    Row(RowEdits(bias={7: -3.0}, banned_token_ids=range(0, 2501, 2))),
    Row(RowEdits(allowed_token_ids=[4, 9, 2500, 700], bias={9: 1.0, 5: 60.0})),
    Row(RowEdits(allowed_token_ids=range(0, 2501, 3), banned_token_ids=[0, 3, 6])),
    Row(RowEdits(repetition=1.8, count_row=0), prompt=range(0, 2501, 2), outputs=[7, 9, 9]),
    Row(RowEdits(repetition=0.4, frequency=-0.5, presence=1.5, count_row=1), range(50), [40, 60, 60, 60, 2500]),
    Row(RowEdits(frequency=1.0, presence=-2.0, bias={60: 40.0}, count_row=2), outputs=[60] * 8 + [61]),
]
CHOICES = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.6, 20, 1.0, 0.0), (1.3, 0, 0.9, 0.0), (0.8, 50, 0.8, 0.05)]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def expected_of(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    counts = torch.zeros(len(rows), NUM_COLUMNS, dtype=torch.int32)
    for row in rows:
        if row.edits.count_row >= 0:
            fill_token_counts(counts[row.edits.count_row], list(row.prompt), list(row.outputs))
    columns = list(zip(*[row.draw(index).draw for index, row in enumerate(rows)], strict=True))[1:]
    packed = pack_draws(*map(list, columns))
    edits = pack_edits([row.edits for row in rows], counts)
    return sample_reference(logits, NUM_COLUMNS, packed, edits)[0].tolist()


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("num_likely", [40, NUM_COLUMNS])
def test_chosen_tokens_equal_those_of_the_reference(
    cpu: CpuBackend, dtype: torch.dtype, num_likely: int, choice: tuple[float, int, float, float]
) -> None:
    """Values after the last column are larger than all others."""
    rows = [Row(row.edits, row.prompt, row.outputs, choice) for row in ROWS for _ in range(3)]
    logits = make_logits(len(rows), NUM_COLUMNS, num_likely)
    logits = torch.cat([logits, torch.full((len(rows), 6), 99.0)], 1).to(dtype)
    before = logits.clone()
    found = cpu.draw_edited(logits, NUM_COLUMNS, [row.draw(index) for index, row in enumerate(rows)])
    assert found == expected_of(logits, rows)
    assert found == ReferenceSampling().draw_edited(logits, NUM_COLUMNS, [row.draw(i) for i, row in enumerate(rows)])
    assert torch.equal(logits, before)
    plain = [cpu.draw_edited(logits, NUM_COLUMNS, [draw]) for draw in (row.draw(i) for i, row in enumerate(rows))]
    assert [token_id for (token_id,) in plain] == found


@pytest.mark.parametrize("index", range(len(ROWS)))
def test_every_kind_of_edit_changes_a_token(cpu: CpuBackend, index: int) -> None:
    """Ensures that the test above fails if an edit is ignored."""
    logits = make_logits(64, NUM_COLUMNS, 40)
    edited = [ROWS[index].draw(row) for row in range(64)]
    assert cpu.draw_edited(logits, NUM_COLUMNS, edited) != cpu.argmax(logits, NUM_COLUMNS)[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_or_allow_no_existing_token_are_flagged(
    host: SamplesOnHost, dtype: torch.dtype, temperature: float
) -> None:
    logits = make_logits(4, NUM_COLUMNS, 40, dtype)
    logits[1, 2400], logits[2, 7] = torch.nan, torch.inf
    nowhere = Row(RowEdits(allowed_token_ids=[NUM_COLUMNS, -1]), choice=(temperature, 0, 1.0, 0.0))
    free = Row(RowEdits(bias={5: 1.0}), choice=(temperature, 0, 1.0, 0.0))
    draws = [nowhere.draw(0), free.draw(1), free.draw(2), free.draw(3)]
    *told, token_id = host.draw_edited(logits, NUM_COLUMNS, draws)
    assert told == [-1, -1, -1]
    assert 0 <= token_id < NUM_COLUMNS


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_edits_exclude_every_token_gets_its_best_allowed_token(
    host: SamplesOnHost, dtype: torch.dtype, temperature: float
) -> None:
    """Banned or not; the lowest id of equal logits. Biases do not count."""
    logits = make_logits(4, NUM_COLUMNS, 40)
    logits[1, [2000, 40, 70]] = torch.tensor([3.0, 9.0, 9.0])
    logits[2, [40, 70]] = torch.tensor([0.0, -0.0])
    logits[3, [40, 70]] = -torch.inf
    logits = torch.cat([logits, torch.full((4, 6), 99.0)], 1).to(dtype)
    allowed = RowEdits(allowed_token_ids=[2000, 70, 40, 9999], bias={2000: 90.0}, banned_token_ids=range(NUM_COLUMNS))
    some = RowEdits(allowed_token_ids=[70, 40, 9999], banned_token_ids=[40, 70])
    choice = (temperature, 0, 1.0, 0.0)
    rows = [Row(edits, choice=choice) for edits in (RowEdits(banned_token_ids=range(NUM_COLUMNS)), allowed, some, some)]
    found = host.draw_edited(logits, NUM_COLUMNS, [row.draw(index) for index, row in enumerate(rows)])
    assert found == expected_of(logits, rows)
    assert found == [int(logits[0, :NUM_COLUMNS].argmax()), 40, 40, 40]


def test_rows_may_be_strided_and_in_any_order(host: SamplesOnHost, dtype: torch.dtype) -> None:
    wide = make_logits(len(ROWS), 2 * NUM_COLUMNS, 40, dtype)
    logits = wide[:, :NUM_COLUMNS]
    draws = [row.draw(index) for index, row in enumerate(ROWS)]
    found = host.draw_edited(logits, NUM_COLUMNS, draws)
    assert host.draw_edited(logits, NUM_COLUMNS, draws[::-1]) == found[::-1]
    assert host.draw_edited(logits.contiguous(), NUM_COLUMNS, draws) == found


def test_a_row_outside_the_logits_is_refused(host: SamplesOnHost) -> None:
    with pytest.raises(ValueError, match=r"draw\.row is 3"):
        host.draw_edited(torch.zeros(3, NUM_COLUMNS), NUM_COLUMNS, [ROWS[0].draw(3)])
    assert host.draw_edited(torch.zeros(3, NUM_COLUMNS), NUM_COLUMNS, []) == []
