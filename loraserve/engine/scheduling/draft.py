"""Drafts a sequence's next tokens, so that one step can check several at once.

A draft comes from the request's prediction, or else from the sequence's own prompt and output: if its last tokens occur
earlier in it, the tokens that followed them there are likely to follow again, as in summaries, edited code and
extracted fields. The model itself chooses every token; a drafted token that it does not choose has cost a row of a
step.
"""

from collections.abc import Sequence as Seq

import numpy as np

MIN_MATCH = 2
"""Number of last tokens that must occur earlier for a match."""
MAX_MATCH = 8
"""Longest match to search for, in tokens."""
MAX_LOOKUP = 16_384
"""How many tokens back to search for a match. If all of them are the same, the search takes 0.6 ms (Zen 4)."""
FIRST_LENGTH = 4
MAX_WAIT = 16
"""After drafts without a correct token, a sequence waits for at most this many tokens before its next draft."""


class Draft:
    """A sequence's drafts. Each is one token longer than the correct part of the one before, or twice as long if all of
    that one was correct."""

    def __init__(self, max_length: int, num_prompt_tokens: int, predicted_token_ids: Seq[int] = ()) -> None:
        """predicted_token_ids: the request's approximate prediction of the output."""
        self._max_length = max_length
        self._prediction = Prediction(predicted_token_ids, num_prompt_tokens)
        self._history = np.empty(0, np.int32)
        """Prompt and output, with spare capacity."""
        self._num_history = 0
        self._length = min(FIRST_LENGTH, max_length)
        self._last: list[int] = []
        """The last draft that was computed and has not been judged yet."""
        self._drafted_at = 0
        """Number of tokens before the last draft."""
        self._num_misses = 0
        """Consecutive drafts without a correct token."""
        self._is_trusted = False
        """All of the last draft was correct."""

    def next(self, token_ids: Seq[int], max_length: int, max_trusted_length: int) -> tuple[list[int], bool]:
        """Returns (tokens that may follow `token_ids`, whether they come from the request's prediction).

        At most `max_length` tokens, or `max_trusted_length` if all of the last draft was correct; may be empty.
        `token_ids` may only grow from call to call.
        """
        self._judge_last(token_ids)
        length = min(self._length, max_trusted_length if self._is_trusted else max_length)
        if length <= 0:
            return [], False
        predicted, is_found = self._prediction.after(token_ids, length)
        if self._is_waiting(len(token_ids), is_found):
            return [], False
        return (predicted, True) if predicted else (self._look_up(token_ids, length), False)

    def note_computed(self, draft: list[int], num_tokens: int) -> None:
        """Record that the next step computes `draft`, all or the beginning of what `next` returned, after `num_tokens`
        tokens."""
        self._last, self._drafted_at = draft, num_tokens

    def _judge_last(self, token_ids: Seq[int]) -> None:
        if not self._last:
            return
        num_right = _num_common(self._last, token_ids[self._drafted_at : self._drafted_at + len(self._last)])
        self._is_trusted = num_right == len(self._last)
        self._length = min(2 * self._length if self._is_trusted else num_right + 1, self._max_length)
        self._num_misses = 0 if num_right else self._num_misses + 1
        self._last = []

    def _is_waiting(self, num_tokens: int, is_found: bool) -> bool:
        """is_found: the prediction contains the next tokens, which justifies one more try at once."""
        num_misses = self._num_misses - is_found
        return num_misses > 0 and num_tokens < self._drafted_at + min(1 << num_misses, MAX_WAIT)

    def _look_up(self, token_ids: Seq[int], length: int) -> list[int]:
        history = self._catch_up(token_ids)[-MAX_LOOKUP:]
        start = find_continuation(history, history[-MAX_MATCH:], len(history))
        if start is None:
            return []
        # If the continuation reaches the end of the text, assume that the text keeps repeating it.
        return history[start + np.arange(length) % (len(history) - start)].tolist()

    def _catch_up(self, token_ids: Seq[int]) -> np.ndarray:
        if len(token_ids) > len(self._history):
            history = np.empty(max(256, 2 * len(token_ids)), np.int32)
            history[: self._num_history] = self._history[: self._num_history]
            self._history = history
        self._history[self._num_history : len(token_ids)] = token_ids[self._num_history :]
        self._num_history = len(token_ids)
        return self._history[: self._num_history]


class Prediction:
    """A request's prediction of an output, and how far the output has progressed in it."""

    def __init__(self, token_ids: Seq[int], num_prompt_tokens: int) -> None:
        self._token_ids = list(token_ids)
        self._array = np.array(token_ids, np.int32)
        self._place = 0
        """Index of the predicted token that should come next."""
        self._num_tokens = num_prompt_tokens
        """Number of tokens in the last call."""
        self._left_at: int | None = None
        """Number of tokens when the output left the prediction; None while it follows it."""

    def after(self, token_ids: Seq[int], length: int) -> tuple[list[int], bool]:
        """Returns (up to `length` predicted tokens after `token_ids`, prompt and output; whether the output follows the
        prediction).

        If the output has just left the prediction, its token is assumed to replace a predicted one. If that was wrong,
        nothing is returned until two tokens in a row are found in the prediction again.
        """
        if not self._token_ids:
            return [], False
        new = token_ids[self._num_tokens :]
        self._num_tokens = len(token_ids)
        num_followed = _num_common(new, self._token_ids[self._place : self._place + len(new)])
        self._place += num_followed
        if num_followed > 0:
            self._left_at = None
        num_other = len(new) - num_followed
        has_just_left = self._left_at is None and num_other == 1
        if num_other > 0:
            self._look_further(token_ids, num_other)
        is_found = self._left_at is None
        if not is_found and not has_just_left:
            return [], False
        left = self._token_ids[self._place : self._place + length]
        return left, is_found and bool(left)

    def _look_further(self, token_ids: Seq[int], num_other: int) -> None:
        """num_other: how many of the last tokens differ from the predicted ones."""
        if self._left_at is None:
            self._left_at = len(token_ids) - num_other
        num_since = len(token_ids) - self._left_at
        left_from = self._place - (num_since - num_other)
        end = np.array(token_ids[-min(num_since, MAX_MATCH) :], np.int32)
        # The output most likely resumes after the point where it left the prediction.
        found = find_continuation(self._array, end, left_from + MIN_MATCH)
        if found is None:
            self._place += num_other
        else:
            self._place, self._left_at = found, None


def find_continuation(text: np.ndarray, end: np.ndarray, place: int) -> int | None:
    """Index in `text` after its longest match with the last tokens of `end`: of several longest matches, the first
    whose continuation is at or after `place`, else the last. None without a match of `MIN_MATCH` tokens."""
    places = np.flatnonzero(text[:-1] == end[-1]) + 1
    length = 1
    while len(places) and length < len(end):
        longer = places[places > length]
        longer = longer[text[longer - 1 - length] == end[-1 - length]]
        if len(longer) == 0:
            break
        places, length = longer, length + 1
    if len(places) == 0 or length < MIN_MATCH:
        return None
    return int(places[min(np.searchsorted(places, place), len(places) - 1)])


def _num_common(tokens: Seq[int], others: Seq[int]) -> int:
    """Length of the common prefix."""
    for i, (token, other) in enumerate(zip(tokens, others, strict=False)):
        if token != other:
            return i
    return min(len(tokens), len(others))
