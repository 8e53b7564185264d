import pytest

from loraserve.api.inference.prompts import check_prompt_logprobs, split_prompts, truncate, truncate_around
from loraserve.serving.errors import ServingError
from loraserve.serving.settings import RequestLimits

LIMITS = RequestLimits(max_prompts=3)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([[]], [[]]),
    ],
)
def test_all_four_forms_of_prompts_are_accepted(
    prompt: str | list[str | int | list[int]], expected: list[str | list[int]]
) -> None:
    assert split_prompts("prompt", prompt, LIMITS.max_prompts, 10) == expected


@pytest.mark.parametrize("prompt", [[], ["a", 1], [1, [2]], ["a", [1]], [10], [[-1]], [[1, 10]], ["a"] * 4, [[1]] * 4])
def test_invalid_forms_of_prompts_are_refused(prompt: list[str | int | list[int]]) -> None:
    with pytest.raises(ServingError) as caught:
        split_prompts("prompt", prompt, LIMITS.max_prompts, 10)
    assert caught.value.param == "prompt"


def test_truncate_keeps_the_end() -> None:
    assert truncate([1, 2, 3], None, 8, None) == [1, 2, 3]
    assert truncate([1, 2, 3], 2, 8, None) == [2, 3]
    for limit in (0, -2, 9):
        with pytest.raises(ServingError, match="truncate_prompt_tokens"):
            truncate([1], limit, 8, None)


@pytest.mark.parametrize(("max_tokens", "kept"), [(None, 7), (0, 7), (1, 7), (5, 3), (8, 1), (100, 1)])
def test_truncate_leaves_room_for_the_answer(max_tokens: int | None, kept: int) -> None:
    token_ids = list(range(20))
    assert truncate(token_ids, -1, 8, max_tokens) == token_ids[-kept:]
    assert truncate([1], -1, 8, max_tokens) == [1]


@pytest.mark.parametrize(
    ("token_ids", "bare", "limit", "kept"),
    [
        ([90, 1, 2, 3, 91], [1, 2, 3], 4, [90, 1, 2, 91]),
        ([90, 1, 2, 3, 91], [1, 2, 3], 3, [90, 1, 91]),
        ([90, 1, 2, 3, 91], [1, 2, 3], 2, [90, 1]),
        ([90, 1, 2, 3], [1, 2, 3], 2, [90, 1]),
        ([1, 2, 3, 91], [1, 2, 3], 2, [1, 91]),
        ([1, 2, 3], [1, 2, 3], 2, [1, 2]),
        ([7, 8, 9], [1, 2], 2, [7, 8]),
    ],
)
def test_truncate_around_keeps_the_beginning_and_the_tokens_that_the_tokenizer_added(
    token_ids: list[int], bare: list[int], limit: int, kept: list[int]
) -> None:
    assert truncate_around(token_ids, bare, limit) == kept


@pytest.mark.parametrize(("num_tokens", "num_answered", "top"), [(101, 1, 0), (26, 2, 1), (5, 1, 20)])
def test_log_probabilities_of_prompts_are_bounded(num_tokens: int, num_answered: int, top: int) -> None:
    limits = RequestLimits(max_prompt_logprobs=100)
    check_prompt_logprobs("logprobs", num_tokens - 1, num_answered, top, limits)
    with pytest.raises(ServingError, match="the limit is 100"):
        check_prompt_logprobs("logprobs", num_tokens, num_answered, top, limits)
