"""What the sampler must know of a sequence, and the token counts its penalties need."""

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
        """To be led on by other tokens."""
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
    """The row of a device's token counts that a sequence has, until it is another's."""

    count_row: int
    num_output_tokens: int
    """Counted there, or to be counted by what is queued."""


@dataclass(slots=True)
class EditState:
    """What is kept of a sequence's edits from step to step."""

    listed: ListedTokens
    is_below_min_tokens: bool
    """What `listed` holds for."""
    place: CountPlace | None = None
    """On a device."""


@dataclass(slots=True)
class SamplingRow:
    """What the sampler must know of the sequence behind one row of logits.

    Kept from step to step: the engine moves `position` and `output_token_ids` on.
    """

    params: SamplingParams
    seed: int
    """params.seed + choice index."""
    position: int
    """Absolute position of the token being chosen; (seed, position) determines its noise."""
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    """Presence and frequency penalties count these only; the repetition penalty the prompt's too. May be empty when the
    request has neither penalties nor min_tokens."""
    eos_token_ids: tuple[int, ...]
    penalty_state: PenaltyState | None = None
    """Kept for speed by the sampler on the host, which makes it."""
    num_unknown_tokens: int = 0
    """Outputs beyond `output_token_ids`, which a device has still to tell."""
    edit_state: EditState | None = field(default=None, compare=False, repr=False)
    is_greedy: bool = field(init=False)
    """Below vLLM's smallest temperature, 1e-5."""
    has_penalties: bool = field(init=False)
    needs_outputs: bool = field(init=False)
    """Else `output_token_ids` may stay empty."""
    takes_argmax: bool = field(init=False)
    """Whatever the outputs are, the token is its largest logit, unless that is banned."""
    takes_best: bool = field(init=False)
    """As well, and none is ever banned, nor a log-probability asked for."""
    draws_freely: bool = field(init=False)
    """As `takes_argmax`, but that the token is drawn from the logits as they are."""
    is_always_edited: bool = field(init=False)
    """Its logits are, whatever the outputs are."""
    all_stop_token_ids: frozenset[int] = field(init=False)
    """EOS and the request's own; banned below min_tokens, EOS with `ignore_eos` too, as in vLLM."""

    def __post_init__(self) -> None:
        params = self.params
        self.is_greedy = params.temperature < 1e-5
        self.has_penalties = params.has_penalties
        self.needs_outputs = params.has_penalties or params.min_tokens > 0
        self.all_stop_token_ids = frozenset(self.eos_token_ids + params.stop_token_ids)
        self.is_always_edited = bool(params.allowed_token_ids or params.logit_bias or params.has_penalties)
        is_plain = not (self.is_always_edited or params.grammar)
        self.takes_argmax = self.is_greedy and is_plain
        self.takes_best = self.takes_argmax and params.min_tokens == 0 and params.logprobs is None
        self.draws_freely = not self.is_greedy and is_plain

    def after(self, token_ids: Sequence[int]) -> "SamplingRow":
        """As it would be if the sequence went on with these."""
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
        """Whether min_tokens bans a token that could be chosen: of greedy rows only the largest logit's."""
        return self.is_below_min_tokens and (not self.is_greedy or best_id in self.all_stop_token_ids)

    def draw_from(self, row: int) -> Draw:
        """How its token is drawn, of that row of logits."""
        params = self.params
        return Draw(row, params.temperature, params.top_k, params.top_p, params.min_p, self.seed, self.position)

    @property
    def has_edits(self) -> bool:
        return self.is_always_edited or (self.needs_outputs and self.is_below_min_tokens)


def rows_after(row: SamplingRow, draft: Sequence[int]) -> list[SamplingRow]:
    """Of the tokens after each drafted one, each chosen as if those before it were the sequence's."""
    if row.takes_argmax and not row.needs_outputs:
        return [row] * len(draft)
    return [row.after(draft[: i + 1]) for i in range(len(draft))]
