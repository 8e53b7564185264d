"""What changes logits before a token is chosen: allowed tokens, bias, the minimum length, penalties.

Each edit touches only the tokens it names. The order is vLLM's: allowed_token_ids, logit_bias, min_tokens, penalties.
Ids outside the vocabulary are passed over: whether a request may name them is decided where requests enter.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from loraserve_kernels.edited_draw import EditedDraw
from loraserve_kernels.logit_edits import ListedTokens, RowEdits, list_tokens

from loraserve.engine.logit_rows import Floats, Ints, LogitRows
from loraserve.engine.sampling_row import EditState, PenaltyState, SamplingRow


def listed_tokens(row: SamplingRow, vocab_size: int) -> ListedTokens:
    """The row's allowed tokens, biases and bans, made anew only when its sequence gets long enough to stop."""
    state, is_below = row.edit_state, row.is_below_min_tokens
    if state is None:
        state = row.edit_state = EditState(_list(row, vocab_size), is_below)
    elif state.is_below_min_tokens != is_below:
        state.listed, state.is_below_min_tokens = _list(row, vocab_size), is_below
    return state.listed


def _list(row: SamplingRow, vocab_size: int) -> ListedTokens:
    params = row.params
    banned = tuple(row.all_stop_token_ids) if row.is_below_min_tokens else ()
    return list_tokens(RowEdits(params.allowed_token_ids, params.logit_bias, banned), vocab_size)


def edited_draw(row_id: int, row: SamplingRow, vocab_size: int) -> EditedDraw:
    """How the row's token is chosen, of that row of logits, by a backend that edits logits itself."""
    params = row.params
    return EditedDraw(
        row.draw_from(row_id),
        bool(params.allowed_token_ids),
        listed_tokens(row, vocab_size),
        _penalty_state(row).counted if row.has_penalties else None,
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
    )


def edit_rows(logits: LogitRows, row_ids: Ints, rows: Sequence[SamplingRow]) -> LogitRows:
    """A copy of these rows of `logits` with each row's edits applied; `rows` is aligned with `row_ids`."""
    is_blank = np.array([bool(row.params.allowed_token_ids) for row in rows])
    edited = logits.copy_rows(row_ids, is_blank)
    _restore_allowed(logits, row_ids, edited, rows)
    _add_bias(edited, rows)
    _ban_stops_below_min_tokens(edited, rows)
    _apply_penalties(edited, rows)
    return edited


def ids_in_vocab(token_ids: Sequence[int], vocab_size: int) -> Ints:
    """The distinct ones, ascending."""
    distinct = np.unique(np.asarray(token_ids, dtype=np.int64))
    return distinct[(distinct >= 0) & (distinct < vocab_size)]


@dataclass(slots=True)
class _Edits:
    """Token ids of several rows, laid end to end, maybe with a column of numbers aligned with them."""

    vocab_size: int
    row_ids: list[int] = field(default_factory=list)
    token_ids: list[Ints] = field(default_factory=list)
    columns: list[Floats] = field(default_factory=list)

    def add(self, row_id: int, token_ids: Ints, column: Floats | None = None) -> None:
        """`token_ids` without repetition; a column has one number per token."""
        self.row_ids.append(row_id)
        self.token_ids.append(token_ids)
        if column is not None:
            self.columns.append(column)

    def join(self) -> tuple[Ints, Ints, Floats]:
        """Those in the vocabulary; the column is empty where none was given."""
        # Over all rows at once: an operation of numpy takes 5 us in a step.
        token_ids = np.concatenate(self.token_ids)
        row_ids = np.repeat(self.row_ids, [len(ids) for ids in self.token_ids])
        column = np.concatenate(self.columns) if self.columns else np.empty(0, dtype=np.float32)
        keep = (token_ids >= 0) & (token_ids < self.vocab_size)
        if not keep.all():
            row_ids, token_ids = row_ids[keep], token_ids[keep]
            if self.columns:
                column = column[keep]
        return row_ids, token_ids, column


def _restore_allowed(logits: LogitRows, row_ids: Ints, edited: LogitRows, rows: Sequence[SamplingRow]) -> None:
    edits = _Edits(edited.vocab_size)
    for index, row in enumerate(rows):
        if row.params.allowed_token_ids:
            edits.add(index, ids_in_vocab(row.params.allowed_token_ids, edited.vocab_size))
    if edits.row_ids:
        indices, token_ids, _ = edits.join()
        edited.put(indices, token_ids, logits.gather(row_ids[indices], token_ids))


def _add_bias(edited: LogitRows, rows: Sequence[SamplingRow]) -> None:
    edits = _Edits(edited.vocab_size)
    for index, row in enumerate(rows):
        if bias := row.params.logit_bias:
            edits.add(index, np.array(list(bias), dtype=np.int64), np.array(list(bias.values()), dtype=np.float32))
    if edits.row_ids:
        indices, token_ids, biases = edits.join()
        edited.put(indices, token_ids, edited.gather(indices, token_ids) + biases)


def _ban_stops_below_min_tokens(edited: LogitRows, rows: Sequence[SamplingRow]) -> None:
    edits = _Edits(edited.vocab_size)
    for index, row in enumerate(rows):
        if row.is_below_min_tokens:
            edits.add(index, ids_in_vocab(list(row.all_stop_token_ids), edited.vocab_size))
    if edits.row_ids:
        indices, token_ids, _ = edits.join()
        edited.put(indices, token_ids, np.full(len(token_ids), -np.inf, dtype=np.float32))


def _apply_penalties(edited: LogitRows, rows: Sequence[SamplingRow]) -> None:
    edits = _Edits(edited.vocab_size)
    for index, row in enumerate(rows):
        if row.has_penalties:
            state = _penalty_state(row)
            edits.add(index, state.token_ids, state.output_counts)
    if edits.row_ids:
        indices, token_ids, counts = edits.join()
        repetitions, frequencies, presences = _penalties(rows)[:, indices]
        values = edited.gather(indices, token_ids)
        values = np.where(values > 0, values / repetitions, values * repetitions)
        edited.put(indices, token_ids, values - (frequencies * counts + presences * (counts > 0)))


def _penalties(rows: Sequence[SamplingRow]) -> Floats:
    """[3, R]: of repetition, frequency and presence."""
    each = [row.params for row in rows]
    penalties = [(params.repetition_penalty, params.frequency_penalty, params.presence_penalty) for params in each]
    return np.array(penalties, dtype=np.float32).T


def _penalty_state(row: SamplingRow) -> PenaltyState:
    state = row.penalty_state
    if state is None:
        state = row.penalty_state = PenaltyState(row.prompt_token_ids if row.params.repetition_penalty != 1 else ())
    state.catch_up(row.output_token_ids)
    return state
