"""A grammar that begins after the reasoning that a model may write first."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from loraserve.engine.grammars.matcher import GrammarMatcher
from loraserve.engine.request import ReasoningTokens


class ReasoningMatcher:
    """Leaves the reasoning unconstrained, except that it must end before the output does. See `OutputMatcher`."""

    def __init__(self, answer: GrammarMatcher, reasoning: ReasoningTokens, free_mask: NDArray[np.uint8]) -> None:
        """free_mask: allows all tokens except those that end outputs."""
        self._answer = answer
        self._reasoning = reasoning
        self._free_mask = free_mask
        self._is_reasoning = reasoning.opening_id is None
        self._may_open = not self._is_reasoning
        self.use = answer.use

    def copy(self) -> "ReasoningMatcher":
        return ReasoningMatcher(self._answer.copy(), self._reasoning, self._free_mask)

    @property
    def error(self) -> str:
        return self._answer.error

    @property
    def is_awaited(self) -> bool:
        return True

    @property
    def is_complete(self) -> bool:
        return not self._is_reasoning and self._answer.is_complete

    def take(self, token_id: int) -> bool:
        if self._is_reasoning:
            self._is_reasoning = token_id != self._reasoning.closing_id
            return True
        opens = self._may_open and token_id == self._reasoning.opening_id
        self._may_open = False
        self._is_reasoning = opens
        return opens or self._answer.take(token_id)

    def forced_tokens(self) -> list[int]:
        return [] if self._is_reasoning or self._may_open else self._answer.forced_tokens()

    def mask(self) -> NDArray[np.uint8]:
        if self._is_reasoning:
            return self._free_mask
        mask = self._answer.mask()
        if self._may_open and self._reasoning.opening_id is not None:
            byte, bit = divmod(self._reasoning.opening_id, 8)
            mask[byte] |= 1 << bit
        return mask

    def masks_after(self, draft: Sequence[int]) -> list[NDArray[np.uint8]]:
        masks: list[NDArray[np.uint8]] = []
        is_reasoning = self._is_reasoning or (self._may_open and bool(draft) and draft[0] == self._reasoning.opening_id)
        for position, token_id in enumerate(draft if is_reasoning else ()):
            if not self._free_mask[token_id // 8] >> token_id % 8 & 1:
                return masks
            if token_id == self._reasoning.closing_id:
                return masks + self._answer.masks_along(draft[position + 1 :])
            masks.append(self._free_mask)
        return masks if is_reasoning else self._answer.masks_after(draft)
