"""What changes logits before a token is chosen: allowed tokens, bias, the minimum length, penalties.

The order is vLLM's: allowed_token_ids, logit_bias, min_tokens, penalties. Ids outside the vocabulary are ignored:
whether a request may name them is checked where requests enter.
"""

from loraserve_kernels.edited_draw import EditedDraw
from loraserve_kernels.logit_edits import ListedTokens, RowEdits, list_tokens

from loraserve.engine.sampling.row import EditState, PenaltyState, SamplingRow


def listed_tokens(row: SamplingRow, vocab_size: int) -> ListedTokens:
    """The row's allowed tokens, biases and bans, listed again only when its sequence becomes long enough to stop."""
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
    """How the row's token is chosen, from row `row_id` of the logits."""
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


def _penalty_state(row: SamplingRow) -> PenaltyState:
    state = row.penalty_state
    if state is None:
        state = row.penalty_state = PenaltyState(row.prompt_token_ids if row.params.repetition_penalty != 1 else ())
    state.catch_up(row.output_token_ids)
    return state
