from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraserve.engine.draft import FIRST_LENGTH, MAX_MATCH, MAX_WAIT, MIN_MATCH, Draft, Prediction, find_continuation

few_tokens = st.lists(st.integers(0, 3), max_size=40)


def find(text: Sequence[int], end: Sequence[int], place: int = 10**6) -> int | None:
    return find_continuation(np.array(text, np.int32), np.array(end, np.int32), place)


def common_end(text: Sequence[int], end: Sequence[int]) -> int:
    length = 0
    while length < min(len(text), len(end)) and text[-1 - length] == end[-1 - length]:
        length += 1
    return length


@given(text=few_tokens, end=st.lists(st.integers(0, 3), min_size=1, max_size=6), place=st.integers(0, 40))
def test_continuation_is_that_of_the_longest_match(text: list[int], end: list[int], place: int) -> None:
    lengths = {at: common_end(text[:at], end) for at in range(1, len(text))}
    longest = max(lengths.values(), default=0)
    found = find(text, end, place)
    if longest < MIN_MATCH:
        assert found is None
        return
    places = [at for at, length in lengths.items() if length == longest]
    assert found == next((at for at in places if at >= place), places[-1])


def test_one_common_token_is_no_match() -> None:
    assert find([5, 6, 5], [5]) is None
    assert find([5, 6, 7, 5, 6], [5, 6]) == 2


def drafts_of(draft: Draft, said: list[int], more: Sequence[int], max_length: int = 99) -> list[list[int]]:
    """What is drafted on the way to `more`, if each step gains what was right of a draft and a token."""
    made = []
    answer, said = said + list(more), list(said)
    while len(said) < len(answer):
        tokens = draft.next(said, max_length, max_length)
        made.append(tokens)
        said = answer[: len(said) + common_end(tokens[::-1], answer[len(said) :][: len(tokens)][::-1]) + 1]
    return made


def test_what_followed_before_is_drafted_and_drafts_grow_while_they_are_right() -> None:
    text = list(range(100, 160))
    drafts = drafts_of(Draft(32, 60), [*text, 7, 100, 101], text[2:])
    assert [len(tokens) for tokens in drafts[:3]] == [FIRST_LENGTH, 2 * FIRST_LENGTH, 4 * FIRST_LENGTH]
    assert drafts[0] == [102, 103, 104, 105]
    assert drafts[1][0] == 107, "the token after a right draft is the model's own"


def test_no_draft_is_longer_than_asked_for() -> None:
    assert Draft(32, 4).next([1, 2, 3, 4, 5, 6, 7, 8, 1, 2], 3, 3) == [3, 4, 5]
    assert Draft(2, 4).next([1, 2, 3, 4, 5, 6, 7, 8, 1, 2], 9, 9) == [3, 4]


def test_where_the_last_one_was_right_a_draft_may_be_longer() -> None:
    draft, said = Draft(32, 9), [*range(20), 0, 1]
    assert draft.next(said, 2, 9) == [2, 3]
    assert draft.next([*said, 2, 3, 4], 2, 9) == [5, 6, 7, 8, 9, 10, 11, 12]
    assert draft.next([*said, 2, 3, 4, 5, 77, 8, 9], 0, 9) == [], "not all of it was right"


def test_what_repeats_itself_is_drafted_on_and_on() -> None:
    assert Draft(8, 1).next([9, 1, 2, 1, 2], 8, 8) == [1, 2, 1, 2]
    assert Draft(8, 1).next([9, 4, 4, 4], 8, 8) == [4, 4, 4, 4]


def test_a_draft_of_which_a_part_was_right_is_followed_by_one_a_token_longer() -> None:
    draft = Draft(32, 9)
    said = [1, 2, 3, 4, 5, 6, 1, 2]
    assert draft.next(said, 9, 9) == [3, 4, 5, 6]
    said += [3, 4, 8, 1, 2]
    assert draft.next(said, 9, 9) == [3, 4, 8], "two of four were right"


def test_drafts_of_which_nothing_is_right_become_short_and_rare() -> None:
    draft, said, made = Draft(32, 0), [1, 2, 3] * 4, []
    for token in range(1000, 1100):
        said += [token, 1, 2]  # what follows 1, 2 is never what followed it before
        made.append(draft.next(said, 9, 9))
    lengths = [len(tokens) for tokens in made]
    assert lengths[0] == FIRST_LENGTH
    assert set(lengths[1:]) == {0, 1}
    assert lengths.count(1) < 2 + 3 * 100 / MAX_WAIT + 5


def test_a_draft_that_is_right_ends_the_waiting() -> None:
    draft, said = Draft(32, 0), [1, 2, 3, 4, 9, 1, 2]
    assert draft.next(said, 1, 1) == [3]
    said += [7, 1, 2]
    assert draft.next(said, 1, 1) == [7]
    said += [7, 8, 1, 2]
    assert draft.next(said, 1, 1) == [7]
    said += [7]
    assert draft.next(said, 1, 1) == [8], "the last draft was right"


@given(prompt=st.lists(st.integers(0, 3), min_size=1, max_size=20), output=few_tokens)
def test_drafts_follow_from_the_tokens_alone(prompt: list[int], output: list[int]) -> None:
    assert drafts_of(Draft(8, len(prompt)), prompt, output) == drafts_of(Draft(8, len(prompt)), prompt, output)


# ---- predictions


def test_a_prediction_is_followed_from_its_first_token_on() -> None:
    prediction = Prediction([1, 2, 3, 4, 5], 2)
    assert prediction.after([8, 9]) == ([1, 2, 3, 4, 5], True)
    assert prediction.after([8, 9, 1, 2]) == ([3, 4, 5], True)
    assert prediction.after([8, 9, 1, 2, 3, 4, 5]) == ([], False)


@pytest.mark.parametrize(
    ("said", "left", "is_found"),
    [
        ([1, 2, 50], [4, 5, 6, 7, 8, 9], False),  # in place of 3
        ([1, 2, 5, 6], [7, 8, 9], True),  # without 3 and 4
        ([1, 2, 50, 5, 6], [7, 8, 9], True),
        ([1, 2, 50, 51, 52, 3, 4], [5, 6, 7, 8, 9], True),  # three more before 3
        ([50, 51, 52, 53, 54, 55, 56, 57, 58, 59], [], False),
    ],
)
def test_a_prediction_is_left_and_found_again(said: list[int], left: list[int], is_found: bool) -> None:
    at_once = Prediction([1, 2, 3, 4, 5, 6, 7, 8, 9], 1)
    assert at_once.after([99, *said]) == (left, is_found)
    step_by_step = Prediction([1, 2, 3, 4, 5, 6, 7, 8, 9], 1)
    for length in range(1, len(said)):
        step_by_step.after([99, *said[:length]])
    assert step_by_step.after([99, *said]) == (left, is_found)


def test_of_places_that_look_alike_the_next_one_is_taken() -> None:
    prediction = Prediction([1, 2, 3, 1, 2, 4, 1, 2, 5], 0)
    assert prediction.after([1, 2, 3]) == ([1, 2, 4, 1, 2, 5], True)
    assert prediction.after([1, 2, 3, 60, 1, 2]) == ([4, 1, 2, 5], True), "not from the first place on"
    assert prediction.after([1, 2, 3, 60, 1, 2, 61, 1, 2]) == ([5], True)


def test_what_is_found_again_is_drafted_without_waiting() -> None:
    draft = Draft(8, 1, [1, 2, 3, 4, 5, 6, 7, 8])
    assert draft.next([99], 4, 4) == [1, 2, 3, 4]
    assert draft.next([99, 50], 4, 4) == [], "nothing was right, and where it goes on is a guess"
    assert draft.next([99, 50, 2, 3], 4, 4) == [4], "one, as nothing was right"


def test_a_prediction_comes_before_what_was_said() -> None:
    draft = Draft(8, 4, [30])
    assert draft.next([1, 2, 3, 1, 2], 8, 8) == [3, 1, 2, 3], "nothing is left of the prediction"
    draft = Draft(8, 5, [30, 31, 32])
    assert draft.next([1, 2, 3, 1, 2], 8, 8) == [30, 31, 32]


@pytest.mark.parametrize("length", [MAX_MATCH - 1, MAX_MATCH, MAX_MATCH + 5])
def test_ends_longer_than_what_is_looked_for_are_found(length: int) -> None:
    text = list(range(length))
    assert Draft(4, 0).next([*text, 77, *text], 4, 4) == [77, 0, 1, 2]
