from typing import Any

import msgspec
import pytest

from loraserve.api.chat.conversations import conversation_of
from loraserve.api.schemas.chat import ChatCompletionRequest
from loraserve.serving.errors import ServingError
from loraserve.serving.settings import RequestLimits
from loraserve.serving.text.conversation import ChatMessage, Conversation, ToolCall

LIMITS = RequestLimits(max_messages=4, max_template_kwargs=2, max_template_kwargs_bytes=40, max_json_depth=8)
USER = {"role": "user", "content": "x"}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": '{"a": [1, 2.50]}'}}


def conversation(*messages: object, **fields: Any) -> Conversation:
    asked = msgspec.json.decode(msgspec.json.encode({"messages": messages, **fields}), type=ChatCompletionRequest)
    return conversation_of(asked, asked.messages, [], LIMITS)


def test_text_parts_are_joined_and_names_kept() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = conversation({"role": "user", "content": parts, "name": "ada"})
    assert chat.messages == [ChatMessage("user", "a\nb", "ada")]


def test_calls_and_their_results_are_kept() -> None:
    chat = conversation(
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "3.5"},
        {"role": "assistant", "content": "3.5", "tool_calls": []},
    )
    assert chat.messages == [
        ChatMessage("assistant", None, tool_calls=(ToolCall("abcdefghi", "add", '{"a": [1, 2.50]}'),)),
        ChatMessage("tool", "3.5", tool_call_id="abcdefghi"),
        ChatMessage("assistant", "3.5"),
    ]


def test_fields_that_clients_add_to_an_answer_are_ignored() -> None:
    function = {**CALL["function"], "parsed_arguments": {"a": [1, 2.5]}}
    thinking = [{"type": "thinking", "thinking": "Hm.", "signature": "x"}]
    added = {"parsed": {"x": 1}, "provider_specific_fields": {"reasoning": "Hm."}, "thinking_blocks": thinking}
    chat = conversation(
        {"role": "assistant", "content": "4", **added},
        {"role": "assistant", "tool_calls": [{**CALL, "index": 0, "function": function}]},
    )
    plain = conversation({"role": "assistant", "content": "4"}, {"role": "assistant", "tool_calls": [CALL]})
    assert chat.messages == plain.messages


def test_requests_to_cache_a_prefix_are_ignored() -> None:
    marks = {"cache_control": {"type": "ephemeral"}, "prompt_cache_breakpoint": {"mode": "explicit"}}
    part = {"type": "text", "text": "x", **marks}
    system = {"role": "system", "content": "y", "cache_control": {"type": "ephemeral"}}
    assert conversation(system, {"role": "user", "content": [part]}).messages == [
        ChatMessage("system", "y"),
        ChatMessage("user", "x"),
    ]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_kept_even_without_content(name: str) -> None:
    said, cut_off = ({"role": "assistant", "content": content, name: "Hm."} for content in ("4", None))
    called = {"role": "assistant", "content": None, "tool_calls": [CALL], name: "Hm."}
    found = [
        (each.content, each.reasoning, len(each.tool_calls)) for each in conversation(said, cut_off, called).messages
    ]
    assert found == [("4", "Hm.", 0), ("", "Hm.", 0), (None, "Hm.", 1)]
    with pytest.raises(ServingError, match="content"):
        conversation({"role": "assistant", "content": None, name: ""})


def call(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "add", "arguments": "{}", **function}}]}


def test_empty_arguments_become_an_empty_object() -> None:
    (message,) = conversation(call(arguments="")).messages
    assert message.tool_calls[0].arguments == "{}"


@pytest.mark.parametrize("arguments", ["{", '{"a": "b', '{"a": x}</tool_call>'])
def test_truncated_or_malformed_arguments_can_be_sent_back(arguments: str) -> None:
    (message,) = conversation(call(arguments=arguments)).messages
    assert message.tool_calls[0].arguments == arguments


OF_CALL = "messages[1].tool_calls[0].function"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "function", "content": "x"}, "messages[1].role"),
        ({"role": "narrator", "content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "assistant", "tool_calls": []}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "tool", "content": "x"}, "messages[1].tool_call_id"),
        ({"role": "user", "content": "x", "tool_call_id": "x"}, "messages[1].tool_call_id"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}, "messages[1].tool_calls[0].type"),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, OF_CALL),
        (call(name="no spaces"), f"{OF_CALL}.name"),
        (call(name="n" * 65), f"{OF_CALL}.name"),
        (call(arguments="x"), f"{OF_CALL}.arguments"),
        (call(arguments="[1]"), f"{OF_CALL}.arguments"),
        (call(arguments='{"a":' + "[" * 8 + "]" * 8 + "}"), f"{OF_CALL}.arguments"),
    ],
)
def test_errors_name_the_message_at_fault(message: object, param: str) -> None:
    with pytest.raises(ServingError) as caught:
        conversation(USER, message)
    assert caught.value.param == param


def test_continue_final_message_needs_an_assistants_text_and_no_generation_prompt() -> None:
    assistant, calling = {"role": "assistant", "content": "y"}, {"role": "assistant", "tool_calls": [CALL]}
    for last, add in ((assistant, True), (USER, False), (calling, False)):
        with pytest.raises(ServingError, match="continue_final_message"):
            conversation(USER, last, add_generation_prompt=add, continue_final_message=True)
    assert conversation(USER, assistant, add_generation_prompt=False, continue_final_message=True)


def test_the_numbers_of_messages_and_calls_are_limited() -> None:
    for count in (0, 5):
        with pytest.raises(ServingError, match="messages"):
            conversation(*[USER] * count)
    calling = [{"role": "assistant", "tool_calls": [CALL] * count} for count in (2, 3)]
    with pytest.raises(ServingError, match="5 tool calls; the limit is 4"):
        conversation(*calling)


def test_template_variables_are_parsed() -> None:
    given = {"enable_thinking": False, "budget": [1, None]}
    assert conversation(USER, chat_template_kwargs=given).template_kwargs == given
    assert conversation(USER, chat_template_kwargs=None).template_kwargs == {}


@pytest.mark.parametrize(
    ("given", "shown"), [({"a": 1, "b": 2, "c": 3}, "3 entries; the limit is 2"), ({"a": "x" * 38}, "41 bytes")]
)
def test_template_variables_are_bounded(given: dict[str, Any], shown: str) -> None:
    with pytest.raises(ServingError, match=shown) as caught:
        conversation(USER, chat_template_kwargs=given)
    assert caught.value.param == "chat_template_kwargs"


def test_a_number_that_python_cannot_represent_is_a_client_error() -> None:
    body = b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": 1e999}}'
    asked = msgspec.json.decode(body, type=ChatCompletionRequest)
    with pytest.raises(ServingError, match="chat_template_kwargs"):
        conversation_of(asked, asked.messages, [], LIMITS)


def test_calls_and_tools_count_toward_the_size_of_a_conversation() -> None:
    arguments = '{"a": "' + "x" * 5000 + '"}'
    assert conversation(USER).num_chars == 1
    assert conversation(call(arguments=arguments)).num_chars == len("add" + arguments)
    assert Conversation([], tools=[{"type": "function"}]).num_chars == len('[{"type":"function"}]')
