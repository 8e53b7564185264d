"""Follows an output through its grammar: which tokens may come next, and which must."""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

FREE_S = 0.1
TOKEN_S = 0.001
"""Time that a sequence's grammar may take, at first and per token: what llguidance's limits count differs in time."""
DRAFT_SHARE = 0.5
"""Share of that time after which nothing more is drafted: the output itself must not run short of time."""
TOO_SLOW = "computing the allowed next tokens takes too long"


@dataclass(slots=True)
class GrammarUse:
    """Time that a compiled grammar and its copies have taken."""

    spent_s: float = 0.0


class OutputMatcher(Protocol):
    """Follows a sequence's output through its constraint, within the time that this may take."""

    use: GrammarUse

    def copy(self) -> "OutputMatcher":
        """A copy, only to be made of a matcher without output."""
        ...

    @property
    def error(self) -> str:
        """Why the output cannot go on, in one line; "" = it can go on."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow. If the output may go on or end, the tokens that end it are among those that may
        come next."""
        ...

    @property
    def is_awaited(self) -> bool:
        """Whether the mask after the next token depends on that token."""
        ...

    def take(self, token_id: int) -> bool:
        """Take the output's next token. False: there is an `error`, also from the last mask, which then allows only an
        end."""
        ...

    def forced_tokens(self) -> list[int]:
        """Tokens that must follow whatever the model computes, as the tokenizer splits them."""
        ...

    def mask(self) -> NDArray[np.uint8] | None:
        """One bit per token, the least significant first: 1 = it may come next; tokens beyond the last bit may not.
        Must not be written to. None = every token may come."""
        ...

    def masks_after(self, draft: Sequence[int]) -> Sequence[NDArray[np.uint8] | None]:
        """The mask after each drafted token, for as many as are allowed themselves; none if it takes too long."""
        ...


class GrammarMatcher:
    """For an output that a grammar constrains from its first token. See `OutputMatcher`."""

    def __init__(self, matcher: "LLMatcher", tokenizer: "LLTokenizer", use: "GrammarUse") -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._num_mask_words = -(-tokenizer.vocab_size // 32)
        self._num_tokens = 0
        self._spent_s = 0.0
        self.use = use

    def copy(self) -> "GrammarMatcher":
        return GrammarMatcher(self._matcher.deep_copy(), self._tokenizer, self.use)

    @property
    def error(self) -> str:
        return first_line(self._matcher.get_error()) or (TOO_SLOW if self._is_too_slow else "")

    @property
    def is_awaited(self) -> bool:
        return True

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error() and not self._is_too_slow

    def take(self, token_id: int) -> bool:
        began = _begin()
        try:
            is_taken = self._matcher.consume_token(token_id) and not self._matcher.is_error()
        finally:
            self._count(began)
        self._num_tokens += 1
        return is_taken and not self._is_too_slow

    def forced_tokens(self) -> list[int]:
        began = _begin()
        try:
            forced = self._matcher.compute_ff_tokens()
            if any(map(self._tokenizer.is_special_token, forced)):
                forced = forced[: self._matcher.validate_tokens(forced)]  # see `_spell_out`
            return forced
        finally:
            self._count(began)

    def mask(self) -> NDArray[np.uint8]:
        began = _begin()
        try:
            return self._mask_of(self._matcher)
        finally:
            self._count(began)

    def masks_along(self, draft: Sequence[int]) -> list[NDArray[np.uint8]]:
        """`mask` and `masks_after`, for a draft in which the grammar begins; none if it takes too long."""
        return [self.mask(), *self.masks_after(draft)] if self._may_look_ahead else []

    def masks_after(self, draft: Sequence[int]) -> list[NDArray[np.uint8]]:
        if not self._may_look_ahead:
            return []
        masks: list[NDArray[np.uint8]] = []
        began = _begin()
        try:
            ahead = self._matcher.deep_copy()
            for token_id in draft[: ahead.validate_tokens(list(draft))]:
                ahead.consume_token(token_id)
                mask = self._mask_of(ahead)
                if ahead.is_error():
                    break
                masks.append(mask)
        finally:
            self._count(began)
        return masks

    def _mask_of(self, matcher: "LLMatcher") -> NDArray[np.uint8]:
        mask = np.zeros(self._num_mask_words, np.int32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if np.count_nonzero(mask) == 1:  # a single word
            self._spell_out(mask, matcher)
        return mask.view(np.uint8)

    def _spell_out(self, mask: NDArray[np.int32], matcher: "LLMatcher") -> None:
        """For text that reads like an added token, llguidance allows only that token, and then does not take it.

        Allows the first token of the spelled-out text in its place.
        """
        place = int(np.flatnonzero(mask)[0])
        word = int(mask.view(np.uint32)[place])
        token_id = 32 * place + word.bit_length() - 1
        if word.bit_count() > 1 or not self._tokenizer.is_special_token(token_id):
            return
        if matcher.is_error() or matcher.validate_tokens([token_id]):
            return
        spelled = self._tokenizer.greedy_tokenize(matcher.compute_ff_bytes().decode(errors="ignore"))
        if spelled:
            mask[:] = 0
            mask.view(np.uint8)[spelled[0] // 8] = 1 << spelled[0] % 8

    def _count(self, began: tuple[float, bool]) -> None:
        """began: from `_begin`."""
        began_s, was_collecting = began
        spent_s = time.thread_time() - began_s
        self._spent_s += spent_s
        self.use.spent_s += spent_s
        if was_collecting:
            gc.enable()

    @property
    def _may_look_ahead(self) -> bool:
        return self._spent_s <= DRAFT_SHARE * (FREE_S + TOKEN_S * self._num_tokens)

    @property
    def _is_too_slow(self) -> bool:
        return self._spent_s > FREE_S + TOKEN_S * self._num_tokens


def _begin() -> tuple[float, bool]:
    """Start counting the thread's time as the grammar's: (thread time, whether garbage collection was enabled).

    Collection is disabled until `_count`, because it walks what others created: in the engine's tests it took 0.2 s at
    a time, twice what an output's grammar may take.
    """
    was_collecting = gc.isenabled()
    if was_collecting:  # NOTE: if another thread's grammar has disabled it, that thread enables it, perhaps by now
        gc.disable()
    return time.thread_time(), was_collecting


def first_line(reason: str) -> str:
    """The line for a person: the parser's state follows in further lines."""
    return reason.partition("\n")[0].strip()
