from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraserve.engine.scheduling.draft import (
    FIRST_LENGTH,
    MAX_MATCH,
    MAX_WAIT,
    MIN_MATCH,
    Draft,
    Prediction,
    find_continuation,
)

few_tokens = st.lists(st.integers(0, 3), max_size=40)


def find(text: Sequence[int], end: Sequence[int], place: int = 10**6) -> int | None:
    return find_continuation(np.array(text, np.int32), np.array(end, np.int32), place)


def common_end(text: Sequence[int], end: Sequence[int]) -> int:
    length = 0
    while length < min(len(text), len(end)) and text[-1 - length] == end[-1 - length]:
        length += 1
    return length


@given(text=few_tokens, end=st.lists(st.integers(0, 3), min_size=1, max_size=6), place=st.integers(0, 40))
def test_the_continuation_follows_the_longest_match(text: list[int], end: list[int], place: int) -> None:
    lengths = {at: common_end(text[:at], end) for at in range(1, len(text))}
    longest = max(lengths.values(), default=0)
    found = find(text, end, place)
    if longest < MIN_MATCH:
        assert found is None
        return
    places = [at for at, length in lengths.items() if length == longest]
    assert found == next((at for at in places if at >= place), places[-1])


def test_a_single_common_token_is_not_a_match() -> None:
    assert find([5, 6, 5], [5]) is None
    assert find([5, 6, 7, 5, 6], [5, 6]) == 2


def drafted(draft: Draft, said: list[int], max_length: int, max_trusted_length: int | None = None) -> list[int]:
    """Draft the tokens after `said` and note them as computed."""
    tokens, _ = draft.next(said, max_length, max_length if max_trusted_length is None else max_trusted_length)
    if tokens:
        draft.note_computed(tokens, len(said))
    return tokens


def drafts_of(draft: Draft, said: list[int], more: Sequence[int], max_length: int = 99) -> list[list[int]]:
    """The drafts until `more` is output, if each step outputs the correct part of its draft and one more token."""
    made = []
    answer, said = said + list(more), list(said)
    while len(said) < len(answer):
        tokens = drafted(draft, said, max_length)
        made.append(tokens)
        said = answer[: len(said) + common_end(tokens[::-1], answer[len(said) :][: len(tokens)][::-1]) + 1]
    return made


def test_earlier_continuations_are_drafted_and_drafts_double_while_they_are_correct() -> None:
    text = list(range(100, 160))
    drafts = drafts_of(Draft(32, 60), [*text, 7, 100, 101], text[2:])
    assert [len(tokens) for tokens in drafts[:3]] == [FIRST_LENGTH, 2 * FIRST_LENGTH, 4 * FIRST_LENGTH]
    assert drafts[0] == [102, 103, 104, 105]
    assert drafts[1][0] == 107, "the token after a right draft is the model's own"


def test_no_draft_exceeds_the_requested_or_the_maximum_length() -> None:
    assert drafted(Draft(32, 4), [1, 2, 3, 4, 5, 6, 7, 8, 1, 2], 3, 3) == [3, 4, 5]
    assert drafted(Draft(2, 4), [1, 2, 3, 4, 5, 6, 7, 8, 1, 2], 9, 9) == [3, 4]


def test_the_trusted_length_applies_only_if_all_of_the_last_draft_was_correct() -> None:
    draft, said = Draft(32, 9), [*range(20), 0, 1]
    assert drafted(draft, said, 2, 9) == [2, 3]
    assert drafted(draft, [*said, 2, 3, 4], 2, 9) == [5, 6, 7, 8, 9, 10, 11, 12]
    assert drafted(draft, [*said, 2, 3, 4, 5, 77, 8, 9], 0, 9) == [], "not all of it was right"


def test_repetition_at_the_end_of_the_text_is_drafted_repeatedly() -> None:
    assert drafted(Draft(8, 1), [9, 1, 2, 1, 2], 8, 8) == [1, 2, 1, 2]
    assert drafted(Draft(8, 1), [9, 4, 4, 4], 8, 8) == [4, 4, 4, 4]


def test_after_a_partly_correct_draft_the_next_is_one_token_longer_than_the_correct_part() -> None:
    draft = Draft(32, 9)
    said = [1, 2, 3, 4, 5, 6, 1, 2]
    assert drafted(draft, said, 9, 9) == [3, 4, 5, 6]
    said += [3, 4, 8, 1, 2]
    assert drafted(draft, said, 9, 9) == [3, 4, 8], "two of four were right"


def test_drafts_without_a_correct_token_become_rare() -> None:
    draft, said, at = Draft(32, 0), [1, 2, 1, 2], []
    for token in range(1000, 1100):
        if drafted(draft, said, 9):
            at.append(len(said))
        said += [token, 1, 2][len(said) % 3 :] if len(said) % 3 else [token]
    waits = [later - earlier for earlier, later in pairwise(at)]
    assert waits[:3] == sorted(waits[:3])
    assert set(waits[4:]) <= {MAX_WAIT, MAX_WAIT + 1, MAX_WAIT + 2}, "as soon as there is one, and no later"


@pytest.mark.parametrize(("num_misses", "wait"), [(0, 1), (1, 2), (2, 4), (3, 8), (4, 16), (9, 16)])
def test_the_wait_doubles_with_each_draft_without_a_correct_token(num_misses: int, wait: int) -> None:
    draft = Draft(32, 0)
    draft._num_misses, draft._drafted_at = num_misses, 10
    assert next(length for length in range(11, 99) if draft.next([5] * length, 1, 1)[0]) == 10 + wait


def test_a_lookup_without_a_match_does_not_restart_the_wait() -> None:
    draft = Draft(32, 0)
    said = [1, 2, 1, 2]
    assert drafted(draft, said, 1) == [1]
    said += [7, 8]
    assert drafted(draft, said, 1) == [], "there is nothing like it"
    said += [7, 8]
    assert drafted(draft, said, 1) == [7], "four tokens after the last draft, not after the last look"


def test_only_the_computed_part_of_a_draft_is_judged() -> None:
    """A draft that was not computed causes no wait either."""
    draft, said = Draft(32, 0), [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
    assert draft.next(said, 9, 9) == ([3, 4, 5, 6], False)
    said += [9, 1, 2]
    assert draft.next(said, 9, 9) == ([9, 1, 2, 9], False)
    draft.note_computed([9, 1], len(said))
    assert len(drafted(draft, [*said, 9, 1, 2], 9, 9)) == 2 * FIRST_LENGTH, "all of what was computed was right"


# ---- predictions


def test_a_prediction_is_followed_from_its_first_token() -> None:
    prediction = Prediction([1, 2, 3, 4, 5], 2)
    assert prediction.after([8, 9], 3) == ([1, 2, 3], True)
    assert prediction.after([8, 9, 1, 2], 9) == ([3, 4, 5], True)
    assert prediction.after([8, 9, 1, 2, 3, 4, 5], 9) == ([], False)


@pytest.mark.parametrize(
    ("said", "left", "is_found"),
    [
        ([1, 2, 50, 5, 6], [7, 8, 9], True),
        ([1, 2, 5, 6], [7, 8, 9], True),  # without 3 and 4
        ([1, 2, 50, 51, 52, 3, 4], [5, 6, 7, 8, 9], True),  # three tokens inserted before 3
        ([1, 2, 50, 4], [5, 6, 7, 8, 9], True),  # in place of 3, as assumed
        ([50, 51, 52, 53, 54, 55, 56, 57, 58, 59], [], False),
    ],
)
def test_output_can_leave_a_prediction_and_return_to_it(said: list[int], left: list[int], is_found: bool) -> None:
    prediction = Prediction([1, 2, 3, 4, 5, 6, 7, 8, 9], 1)
    for length in range(1, len(said)):
        prediction.after([99, *said[:length]], 9)
    assert prediction.after([99, *said], 9) == (left, is_found)


def test_output_that_just_left_a_prediction_is_assumed_to_have_replaced_one_token() -> None:
    prediction = Prediction([1, 2, 3, 4, 5], 0)
    assert prediction.after([1, 2, 50], 9) == ([4, 5], False)
    assert prediction.after([1, 2, 50, 51], 9) == ([], False), "it was not so"
    assert Prediction([1, 2, 3, 4, 5], 0).after([1, 2, 50, 51], 9) == ([], False), "nor are two"


def test_of_several_matching_places_in_a_prediction_the_next_one_is_chosen() -> None:
    prediction = Prediction([1, 2, 3, 1, 2, 4, 1, 2, 5], 0)
    assert prediction.after([1, 2, 3], 9) == ([1, 2, 4, 1, 2, 5], True)
    assert prediction.after([1, 2, 3, 60, 1, 2], 9) == ([4, 1, 2, 5], True), "not from the first place on"
    assert prediction.after([1, 2, 3, 60, 1, 2, 61, 1, 2], 9) == ([5], True)


def test_inserted_tokens_do_not_move_the_place_where_the_search_starts() -> None:
    prediction, said = Prediction([1, 2, 3, 4, 5, 6, 7, 8, 3, 4, 9], 0), [1, 2, 60, 61, 3, 4]
    for length in range(1, len(said)):
        prediction.after(said[:length], 9)
    assert prediction.after(said, 9) == ([5, 6, 7, 8, 3, 4, 9], True)


def test_prompt_and_output_are_searched_while_the_output_has_left_the_prediction() -> None:
    draft = Draft(8, 5, [*range(200, 260)])
    said = [1, 2, 3, 4, 5]
    assert drafted(draft, said, 2) == [200, 201]
    said += [1, 2, 3]
    assert drafted(draft, said, 2) == [4], "of the prompt, not of the prediction"


def test_a_prediction_that_is_found_again_is_drafted_without_waiting() -> None:
    draft = Draft(8, 1, [1, 2, 3, 4, 5, 6, 7, 8])
    assert drafted(draft, [99], 4, 4) == [1, 2, 3, 4]
    assert drafted(draft, [99, 50], 4) == [], "nothing was right, and where it goes on is a guess"
    assert drafted(draft, [99, 50, 2, 3], 4, 4) == [4], "one, as nothing was right"


def test_a_prediction_takes_precedence_over_prompt_and_output() -> None:
    draft = Draft(8, 4, [30])
    assert drafted(draft, [1, 2, 3, 1, 2], 8, 8) == [3, 1, 2, 3], "nothing is left of the prediction"
    draft = Draft(8, 5, [30, 31, 32])
    assert drafted(draft, [1, 2, 3, 1, 2], 8, 8) == [30, 31, 32]


@pytest.mark.parametrize("length", [MAX_MATCH - 1, MAX_MATCH, MAX_MATCH + 5])
def test_repeated_text_around_the_longest_match_length_is_found(length: int) -> None:
    text = list(range(length))
    assert drafted(Draft(4, 0), [*text, 77, *text], 4, 4) == [77, 0, 1, 2]
