import msgspec
import pytest

from loraserve.api.prompts import chat_messages, check_prompt_logprobs, split_prompts, truncate
from loraserve.api.schemas.chat import RequestMessage
from loraserve.serving.chat_template import ChatMessage
from loraserve.serving.errors import ServingError
from loraserve.serving.settings import Limits

LIMITS = Limits(max_prompts=3, max_messages=4)


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
def test_the_four_forms(prompt: str | list[str | int | list[int]], expected: list[str | list[int]]) -> None:
    assert split_prompts(prompt, LIMITS, 10) == expected


@pytest.mark.parametrize("prompt", [[], ["a", 1], [1, [2]], ["a", [1]], [10], [[-1]], [[1, 10]], ["a"] * 4, [[1]] * 4])
def test_refused_forms(prompt: list[str | int | list[int]]) -> None:
    with pytest.raises(ServingError) as caught:
        split_prompts(prompt, LIMITS, 10)
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


@pytest.mark.parametrize(("num_tokens", "num_answered", "top"), [(101, 1, 0), (26, 2, 1), (5, 1, 20)])
def test_log_probabilities_of_prompts_are_bounded(num_tokens: int, num_answered: int, top: int) -> None:
    limits = Limits(max_prompt_logprobs=100)
    check_prompt_logprobs(num_tokens - 1, num_answered, top, limits)
    with pytest.raises(ServingError, match="the limit is 100"):
        check_prompt_logprobs(num_tokens, num_answered, top, limits)


def messages(*chat: object) -> list[RequestMessage]:
    return msgspec.convert(list(chat), list[RequestMessage])


def test_text_parts_are_joined_and_names_kept() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = chat_messages(
        messages({"role": "user", "content": parts, "name": "ada"}),
        LIMITS,
        add_generation_prompt=True,
        continue_final_message=False,
    )
    assert chat == [ChatMessage("user", "a\nb", "ada")]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x"}, "messages[1].role"),
        ({"role": "function", "content": "x"}, "messages[1].role"),
        ({"role": "narrator", "content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
    ],
)
def test_the_message_at_fault_is_named(message: object, param: str) -> None:
    with pytest.raises(ServingError) as caught:
        chat_messages(
            messages({"role": "user", "content": "fine"}, message),
            LIMITS,
            add_generation_prompt=True,
            continue_final_message=False,
        )
    assert caught.value.param == param


def test_continue_final_message_needs_an_assistants_message_and_no_generation_prompt() -> None:
    user, assistant = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
    for chat, add in (([user, assistant], True), ([user], False)):
        with pytest.raises(ServingError, match="continue_final_message"):
            chat_messages(messages(*chat), LIMITS, add_generation_prompt=add, continue_final_message=True)
    assert chat_messages(messages(user, assistant), LIMITS, add_generation_prompt=False, continue_final_message=True)


def test_how_many_messages() -> None:
    for count in (0, 5):
        with pytest.raises(ServingError, match="messages"):
            chat_messages(
                messages(*[{"role": "user", "content": "x"}] * count),
                LIMITS,
                add_generation_prompt=True,
                continue_final_message=False,
            )
