"""Drafts what a sequence says next, for a step to check several tokens at once.

From what the request predicts, and else from what was told or said before: where a sequence's last tokens stand earlier
in it, what followed them there is likely to follow again, as in summaries, edited code and extracted fields. The model
itself chooses every token; a drafted one that it does not choose has cost a row of a step.
"""

from collections.abc import Sequence as Seq

import numpy as np

MIN_MATCH = 2
"""Last tokens that must stand earlier, too."""
MAX_MATCH = 8
"""No longer match is looked for."""
MAX_LOOKUP = 16_384
"""Tokens back that one is looked for: where all of them are the same, 0.6 ms (Zen 4)."""
FIRST_LENGTH = 4
MAX_WAIT = 16
"""Tokens that a sequence waits at most, after drafts of which nothing was right, before it is given another one."""


class Draft:
    """A sequence's drafts: each a token longer than the one before was right; twice as long if all of that was."""

    def __init__(self, max_length: int, num_prompt_tokens: int, predicted_token_ids: Seq[int] = ()) -> None:
        """predicted_token_ids: what the request says that its output will be, more or less."""
        self._max_length = max_length
        self._prediction = Prediction(predicted_token_ids, num_prompt_tokens)
        self._said = np.empty(0, np.int32)
        """Prompt and output, with room for more."""
        self._num_said = 0
        self._length = min(FIRST_LENGTH, max_length)
        self._last: list[int] = []
        """That was computed and is not judged yet."""
        self._drafted_at = 0
        """Tokens before the last draft."""
        self._num_misses = 0
        """Drafts in a row of which nothing was right."""
        self._is_trusted = False
        """All of the last one was right."""

    def next(self, token_ids: Seq[int], max_length: int, max_trusted_length: int) -> tuple[list[int], bool]:
        """(What may follow `token_ids`, which only ever grow; whether the request predicts it).

        At most `max_length` tokens, or none; max_trusted_length: in its place where all of the last draft was right.
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
        """The next step computes this, which `next` gave or began with, behind so many tokens."""
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
        """is_found: what comes next was found in the prediction, which is reason for one more try at once."""
        num_misses = self._num_misses - is_found
        return num_misses > 0 and num_tokens < self._drafted_at + min(1 << num_misses, MAX_WAIT)

    def _look_up(self, token_ids: Seq[int], length: int) -> list[int]:
        said = self._catch_up(token_ids)[-MAX_LOOKUP:]
        start = find_continuation(said, said[-MAX_MATCH:], len(said))
        if start is None:
            return []
        # What repeats itself goes on to repeat itself.
        return said[start + np.arange(length) % (len(said) - start)].tolist()

    def _catch_up(self, token_ids: Seq[int]) -> np.ndarray:
        if len(token_ids) > len(self._said):
            said = np.empty(max(256, 2 * len(token_ids)), np.int32)
            said[: self._num_said] = self._said[: self._num_said]
            self._said = said
        self._said[self._num_said : len(token_ids)] = token_ids[self._num_said :]
        self._num_said = len(token_ids)
        return self._said[: self._num_said]


class Prediction:
    """What an output is said to be beforehand, and how far the output has come in it."""

    def __init__(self, token_ids: Seq[int], num_prompt_tokens: int) -> None:
        self._token_ids = list(token_ids)
        self._array = np.array(token_ids, np.int32)
        self._place = 0
        """Of what comes next."""
        self._num_tokens = num_prompt_tokens
        """As the last call found them."""
        self._left_at: int | None = None
        """Tokens when the output left it; None while it is followed."""

    def after(self, token_ids: Seq[int], length: int) -> tuple[list[int], bool]:
        """(Up to `length` tokens that come next in it after `token_ids`, prompt and output; whether that is known).

        Where the output has just left it, the token is guessed to stand in place of another. Where that was not so,
        nothing comes next until two tokens in a row are found in it again.
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
        """num_other: last tokens that are not what was to come next."""
        if self._left_at is None:
            self._left_at = len(token_ids) - num_other
        num_since = len(token_ids) - self._left_at
        left_from = self._place - (num_since - num_other)
        end = np.array(token_ids[-min(num_since, MAX_MATCH) :], np.int32)
        # What is found again most likely lies behind what was left.
        found = find_continuation(self._array, end, left_from + MIN_MATCH)
        if found is None:
            self._place += num_other
        else:
            self._place, self._left_at = found, None


def find_continuation(text: np.ndarray, end: np.ndarray, place: int) -> int | None:
    """Where in `text` goes on what stands there as it stands in the last tokens of `end`: of the longest matches the
    first whose continuation is at `place` or behind it, else the last. None without a match of `MIN_MATCH` tokens."""
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
    """How many they begin with alike."""
    for i, (token, other) in enumerate(zip(tokens, others, strict=False)):
        if token != other:
            return i
    return min(len(tokens), len(others))
