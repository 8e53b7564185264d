"""The sampler's input for a sequence, and the token counts that its penalties need."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace

import numpy as np
from loraserve_kernels.draw import Draw
from loraserve_kernels.edited_draw import CountedTokens
from loraserve_kernels.logit_edits import ListedTokens

from loraserve.engine.request import SamplingParams


class PenaltyState:
    """The distinct tokens of a prompt and its output, and how often the output has each.

    One per sequence with penalties, kept for as long as its outputs are (also while preempted). `catch_up` costs O(1)
    per token not yet seen.
    """

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        distinct = np.unique(np.asarray(prompt_token_ids, dtype=np.int64))
        token_ids = np.concatenate([distinct, np.zeros(64, dtype=np.int64)])
        self.counted = CountedTokens(token_ids, np.zeros(len(token_ids), dtype=np.float32), len(distinct))
        self._index_of = {token_id: index for index, token_id in enumerate(distinct.tolist())}
        self._num_output_tokens = 0

    def catch_up(self, output_token_ids: Sequence[int]) -> None:
        """Count the tokens appended since the last call. NOTE: outputs only ever grow."""
        assert len(output_token_ids) >= self._num_output_tokens, "output tokens were taken back"
        for token_id in output_token_ids[self._num_output_tokens :]:
            index = self._find_or_add(token_id)  # may move the arrays
            self.counted.counts[index] += 1
        self._num_output_tokens = len(output_token_ids)

    def copy(self) -> "PenaltyState":
        """A copy that can continue with other tokens."""
        state = copy(self)
        state.counted = CountedTokens(
            self.counted.token_ids.copy(), self.counted.counts.copy(), self.counted.num_tokens
        )
        state._index_of = dict(self._index_of)
        return state

    def _find_or_add(self, token_id: int) -> int:
        index = self._index_of.setdefault(token_id, self.counted.num_tokens)
        if index == self.counted.num_tokens:
            if index == len(self.counted.token_ids):
                self._grow()
            self.counted.token_ids[index] = token_id
            self.counted.num_tokens += 1
        return index

    def _grow(self) -> None:
        token_ids, counts = self.counted.token_ids, self.counted.counts
        self.counted = CountedTokens(
            np.concatenate([token_ids, np.zeros_like(token_ids)]),
            np.concatenate([counts, np.zeros_like(counts)]),
            self.counted.num_tokens,
        )


@dataclass(slots=True, eq=False)
class CountPlace:
    """A sequence's row of a device's token counts, until another sequence takes it."""

    count_row: int
    num_output_tokens: int
    """Tokens counted there, or to be counted by work that is queued."""


@dataclass(slots=True)
class EditState:
    """A sequence's edits, kept from step to step."""

    listed: ListedTokens
    is_below_min_tokens: bool
    """The value that `listed` is valid for."""
    place: CountPlace | None = None
    """On a device."""


@dataclass(slots=True)
class SamplingRow:
    """The sampler's input for the sequence of one row of logits.

    Kept from step to step: the engine updates `position` and `output_token_ids`.
    """

    params: SamplingParams
    seed: int
    """params.seed + choice index."""
    position: int
    """Absolute position of the token being chosen; (seed, position) determines its noise."""
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    """Presence and frequency penalties count only these; the repetition penalty counts the prompt's too. May be empty
    if the request has neither penalties nor min_tokens."""
    eos_token_ids: tuple[int, ...]
    penalty_state: PenaltyState | None = None
    """Created and kept, for speed, by the sampler on the host."""
    num_unknown_tokens: int = 0
    """Output tokens after `output_token_ids` that a device has not returned yet."""
    edit_state: EditState | None = field(default=None, compare=False, repr=False)
    is_greedy: bool = field(init=False)
    """The temperature is below vLLM's smallest, 1e-5."""
    has_penalties: bool = field(init=False)
    needs_outputs: bool = field(init=False)
    """If not, `output_token_ids` may stay empty."""
    takes_argmax: bool = field(init=False)
    """Whatever the outputs are, the token has the row's largest logit, unless that token is banned."""
    takes_best: bool = field(init=False)
    """`takes_argmax`, no token is ever banned, and no log-probability is requested."""
    draws_freely: bool = field(init=False)
    """As `takes_argmax`, but the token is drawn from the logits as they are."""
    is_always_edited: bool = field(init=False)
    """Its logits are edited, whatever the outputs are."""
    all_stop_token_ids: frozenset[int] = field(init=False)
    """EOS and the request's own; banned below min_tokens, EOS even with `ignore_eos`, as in vLLM."""

    def __post_init__(self) -> None:
        params = self.params
        self.is_greedy = params.temperature < 1e-5
        self.has_penalties = params.has_penalties
        self.needs_outputs = params.has_penalties or params.min_tokens > 0
        self.all_stop_token_ids = frozenset(self.eos_token_ids + params.stop_token_ids)
        self.is_always_edited = bool(params.allowed_token_ids or params.logit_bias or params.has_penalties)
        is_plain = not (self.is_always_edited or params.grammar or params.reasoning_limit)
        self.takes_argmax = self.is_greedy and is_plain
        self.takes_best = self.takes_argmax and params.min_tokens == 0 and params.logprobs is None
        self.draws_freely = not self.is_greedy and is_plain

    def after(self, token_ids: Sequence[int]) -> "SamplingRow":
        """The row if the sequence continued with these tokens."""
        row = replace(self, position=self.position + len(token_ids))
        if row.needs_outputs:
            row.output_token_ids = [*self.output_token_ids, *token_ids]
        row.penalty_state = None if self.penalty_state is None else self.penalty_state.copy()
        return row

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids) + self.num_unknown_tokens

    @property
    def is_below_min_tokens(self) -> bool:
        return self.num_output_tokens < self.params.min_tokens

    def has_bans(self, best_id: int) -> bool:
        """Whether min_tokens bans a token that could be chosen: for greedy rows, only the largest logit's."""
        return self.is_below_min_tokens and (not self.is_greedy or best_id in self.all_stop_token_ids)

    def draw_from(self, row: int) -> Draw:
        """How its token is drawn, from this row of the logits."""
        params = self.params
        return Draw(row, params.temperature, params.top_k, params.top_p, params.min_p, self.seed, self.position)

    @property
    def has_edits(self) -> bool:
        return self.is_always_edited or (self.needs_outputs and self.is_below_min_tokens)


def rows_after(row: SamplingRow, draft: Sequence[int]) -> list[SamplingRow]:
    """Rows for the token after each drafted one, as if the drafted tokens up to there were the sequence's."""
    if row.takes_argmax and not row.needs_outputs:
        return [row] * len(draft)
    return [row.after(draft[: i + 1]) for i in range(len(draft))]
