from typing import Any

import msgspec
import pytest

from loraserve.api.responses.input import response_conversation
from loraserve.api.schemas.responses import ResponsesRequest
from loraserve.serving.errors import ServingError
from loraserve.serving.settings import RequestLimits
from loraserve.serving.text.conversation import ChatMessage, ToolCall

LIMITS = RequestLimits(max_messages=6, max_json_depth=8)
USER = {"role": "user", "content": "x"}
CALL = {"type": "function_call", "call_id": "abcdefghi", "name": "add", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "abcdefghi", "output": "2"}
ADD = ToolCall("abcdefghi", "add", '{"a": 1}')


def messages_of(*items: object, **fields: Any) -> list[ChatMessage]:
    body = msgspec.json.encode({"input": items, **fields})
    return [*response_conversation(msgspec.json.decode(body, type=ResponsesRequest), [], LIMITS).messages]


def test_a_string_is_a_user_message_and_instructions_come_first() -> None:
    asked = ResponsesRequest(input="x", instructions="Be brief.")
    found = response_conversation(asked, [{"type": "function"}], LIMITS)
    assert found.messages == [ChatMessage("system", "Be brief."), ChatMessage("user", "x")]
    assert found.tools == [{"type": "function"}]
    assert found.add_generation_prompt
    for nothing in (None, ""):
        assert messages_of(USER, instructions=nothing) == [ChatMessage("user", "x")]


def test_every_form_of_message_is_accepted() -> None:
    mark = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    parts = [{"type": "input_text", "text": "a", **mark}, {"type": "input_text", "text": "b"}]
    answer = {"type": "output_text", "text": "c", "annotations": [], "logprobs": [{"token": "c"}]}
    assert messages_of(
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": parts},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [answer]},
        {"role": "system", "content": "", "phase": None},
    ) == [
        ChatMessage("developer", "d"),
        ChatMessage("user", "a\nb"),
        ChatMessage("assistant", "c"),
        ChatMessage("system", ""),
    ]
    assert messages_of(USER, chat_template_kwargs={}) == messages_of(USER)


def test_text_and_calls_of_one_turn_become_one_message() -> None:
    said = {"role": "assistant", "content": "I add."}
    assert messages_of(USER, said, CALL, {**CALL, "call_id": "b", "arguments": ""}, OUTPUT, CALL) == [
        ChatMessage("user", "x"),
        ChatMessage("assistant", "I add.", tool_calls=(ADD, ToolCall("b", "add", "{}"))),
        ChatMessage("tool", "2", tool_call_id="abcdefghi"),
        ChatMessage("assistant", None, tool_calls=(ADD,)),
    ]


def test_reasoning_belongs_to_the_turn_that_follows_it() -> None:
    part = {"type": "reasoning_text", "text": "Hm."}
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "status": "completed", "content": [part]}
    summed = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So."}], "encrypted_content": None}
    said = {"role": "assistant", "content": "I add."}
    assert messages_of(USER, thought, said, CALL, OUTPUT) == [
        ChatMessage("user", "x"),
        ChatMessage("assistant", "I add.", tool_calls=(ADD,), reasoning="Hm."),
        ChatMessage("tool", "2", tool_call_id="abcdefghi"),
    ]
    assert messages_of(thought, USER, summed, CALL, OUTPUT, thought) == [
        ChatMessage("assistant", "", reasoning="Hm."),
        ChatMessage("user", "x"),
        ChatMessage("assistant", None, tool_calls=(ADD,), reasoning="So."),
        ChatMessage("tool", "2", tool_call_id="abcdefghi"),
        ChatMessage("assistant", "", reasoning="Hm."),
    ]
    assert messages_of(thought, summed) == [ChatMessage("assistant", "", reasoning="Hm.\nSo.")]


@pytest.mark.parametrize("fields", [{}, {"summary": [], "encrypted_content": None}, {"content": [], "status": None}])
def test_reasoning_without_text_is_ignored(fields: Any) -> None:
    nothing = {"type": "reasoning", **fields}
    assert messages_of(USER, nothing, CALL, nothing, CALL, OUTPUT) == messages_of(USER, CALL, CALL, OUTPUT)
    assert messages_of(USER, nothing, USER) == messages_of(USER, USER)
    assert messages_of(nothing, instructions="x") == [ChatMessage("system", "x")]
    with pytest.raises(ServingError, match="has no text") as caught:
        messages_of(nothing)
    assert caught.value.param == "input"


def test_the_output_of_a_call_may_have_parts_and_a_name() -> None:
    parts = [{"type": "input_text", "text": "2"}]
    (message,) = messages_of({**OUTPUT, "output": parts, "name": "add"})
    assert message == ChatMessage("tool", "2", "add", tool_call_id="abcdefghi")


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "narrator", "content": "x"}, "input[1].role"),
        ({"role": "tool", "content": "x"}, "input[1].role"),
        ({"content": "x"}, "input[1].role"),
        ({"role": "user"}, "input[1].content"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[1].content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": "x"}]}, "input[1].content[0]"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[1].content[0].text"),
        (
            {"role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": [{"index": 1}]}]},
            "input[1].content[0].annotations",
        ),
        ({**USER, "call_id": "x"}, "input[1].call_id"),
        ({**USER, "name": "ada"}, "input[1].name"),
        ({**USER, "phase": "final_answer"}, "input[1].phase"),
        ({"type": "item_reference", "id": "msg_1"}, "input[1].type"),
        ({"type": "function_call", "name": "add", "arguments": "{}"}, "input[1].call_id"),
        ({"type": "function_call", "call_id": "x", "arguments": "{}"}, "input[1].name"),
        ({"type": "function_call", "call_id": "x", "name": "add"}, "input[1].arguments"),
        ({**CALL, "name": "no spaces"}, "input[1].name"),
        ({"type": "reasoning", "encrypted_content": "x"}, "input[1].encrypted_content"),
        ({"type": "reasoning", "content": [{"type": "output_text", "text": "x"}]}, "input[1].content[0]"),
        ({**USER, "summary": []}, "input[1].summary"),
        ({**CALL, "arguments": "[1]"}, "input[1].arguments"),
        ({**CALL, "arguments": '{"a":' * 9 + "1" + "}" * 9}, "input[1].arguments"),
        ({**CALL, "namespace": "math"}, "input[1].namespace"),
        ({**CALL, "content": "x"}, "input[1].content"),
        ({"type": "function_call_output", "output": "2"}, "input[1].call_id"),
        ({"type": "function_call_output", "call_id": "x"}, "input[1].output"),
        ({**OUTPUT, "output": [{"type": "input_file"}]}, "input[1].output[0]"),
        ({**OUTPUT, "role": "tool"}, "input[1].role"),
    ],
)
def test_errors_name_the_field_at_fault(item: object, param: str) -> None:
    with pytest.raises(ServingError) as caught:
        messages_of(USER, item)
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize(("items", "message"), [([], "is empty"), ([USER] * 7, "has 7 items; the limit is 6")])
def test_the_number_of_items_is_limited(items: list[object], message: str) -> None:
    with pytest.raises(ServingError, match=message) as caught:
        messages_of(*items)
    assert caught.value.param == "input"
