"""Ends a model's reasoning after a number of tokens."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from loraserve.engine.grammars.matcher import GrammarUse, OutputMatcher
from loraserve.engine.request import ReasoningLimit


class ReasoningLimiter:
    """Leaves an output as it is, or as its grammar constrains it, except that its reasoning must end at its limit. See
    `OutputMatcher`."""

    def __init__(self, limit: ReasoningLimit, vocab_size: int, grammar: OutputMatcher | None = None) -> None:
        """grammar: of an output without tokens."""
        self._limit = limit
        self._vocab_size = vocab_size
        self._grammar = grammar
        self._num_taken = 0
        self._num_reasoning_tokens = 0
        self._is_reasoning = limit.tokens.opening_id is None
        self._may_open = not self._is_reasoning
        self.use = GrammarUse() if grammar is None else grammar.use

    def copy(self) -> "ReasoningLimiter":
        return ReasoningLimiter(self._limit, self._vocab_size, None if self._grammar is None else self._grammar.copy())

    @property
    def error(self) -> str:
        return "" if self._grammar is None else self._grammar.error

    @property
    def is_complete(self) -> bool:
        return self._grammar is not None and self._grammar.is_complete

    @property
    def is_awaited(self) -> bool:
        if self._grammar is not None and self._grammar.is_awaited:
            return True
        return self._num_left <= 1 if self._is_reasoning else self._may_open and self._limit.max_tokens == 0

    def take(self, token_id: int) -> bool:
        self._num_taken += 1
        if self._is_reasoning:
            self._is_reasoning = token_id != self._limit.tokens.closing_id
            self._num_reasoning_tokens += self._is_reasoning
        elif self._may_open:
            self._is_reasoning = token_id == self._limit.tokens.opening_id
            self._may_open = not self._is_reasoning and self._num_taken < self._limit.tokens.opens_within
        return self._grammar is None or self._grammar.take(token_id)

    def forced_tokens(self) -> list[int]:
        if self._must_close:
            return [self._limit.tokens.closing_id]
        return [] if self._grammar is None else self._grammar.forced_tokens()

    def mask(self) -> NDArray[np.uint8] | None:
        if self._must_close:
            return _only(self._limit.tokens.closing_id, self._vocab_size)
        return None if self._grammar is None else self._grammar.mask()

    def masks_after(self, draft: Sequence[int]) -> Sequence[NDArray[np.uint8] | None]:
        draft = draft[: self._num_free(draft)]
        return [None] * len(draft) if self._grammar is None else self._grammar.masks_after(draft)

    def _num_free(self, draft: Sequence[int]) -> int:
        """Number of drafted tokens after which the reasoning does not have to end."""
        if self._may_open:
            opening_id = self._limit.tokens.opening_id
            return draft.index(opening_id) if opening_id in draft else len(draft)
        if not self._is_reasoning or self._limit.tokens.closing_id in draft[: self._num_left]:
            return len(draft)
        return max(self._num_left - 1, 0)

    @property
    def _num_left(self) -> int:
        """Reasoning tokens until it must end."""
        return self._limit.max_tokens - self._num_reasoning_tokens

    @property
    def _must_close(self) -> bool:
        return self._is_reasoning and self._num_left <= 0


def _only(token_id: int, vocab_size: int) -> NDArray[np.uint8]:
    """A mask, as in `OutputMatcher`, that allows this token alone."""
    mask = np.zeros(-(-vocab_size // 8), np.uint8)
    mask[token_id // 8] = 1 << token_id % 8
    return mask
