from typing import Any

import msgspec
import pytest

from loraserve.api.messages.input import message_conversation
from loraserve.api.schemas.messages import MessagesRequest
from loraserve.serving.errors import ServingError
from loraserve.serving.settings import RequestLimits
from loraserve.serving.text.conversation import ChatMessage, Conversation, ToolCall

LIMITS = RequestLimits(max_messages=6, max_json_depth=8)
USER = {"role": "user", "content": "x"}
CALL = {"type": "tool_use", "id": "toolu_abcdefghi", "name": "add", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_abcdefghi", "content": "2"}
ADD = ToolCall("abcdefghi", "add", '{"a":1}')


def conversation(*messages: object, **fields: Any) -> Conversation:
    body = msgspec.json.encode({"messages": messages, "max_tokens": 1, **fields})
    return message_conversation(msgspec.json.decode(body, type=MessagesRequest), [], LIMITS)


def messages_of(*messages: object, **fields: Any) -> list[ChatMessage]:
    return [*conversation(*messages, **fields).messages]


def text(said: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **fields}


def said(*blocks: object) -> dict[str, Any]:
    return {"role": "assistant", "content": blocks}


def sent(*blocks: object) -> dict[str, Any]:
    return {"role": "user", "content": blocks}


def test_every_form_of_text_is_accepted() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    assert messages_of(
        sent(text("a", **cached), text("b", citations=None)),
        {"role": "assistant", "content": "c"},
        {"role": "system", "content": "d"},
        USER,
        system=[text("e", **cached), text("f")],
    ) == [
        ChatMessage("system", "e\nf"),
        ChatMessage("user", "a\nb"),
        ChatMessage("assistant", "c"),
        ChatMessage("system", "d"),
        ChatMessage("user", "x"),
    ]
    assert messages_of(USER, system="e") == [ChatMessage("system", "e"), ChatMessage("user", "x")]
    for nothing in (None, "", []):
        assert messages_of(USER, system=nothing) == [ChatMessage("user", "x")]
    for nothing in ("", []):
        assert messages_of({"role": "user", "content": nothing}) == [ChatMessage("user", "")]


def test_consecutive_messages_of_one_role_become_one_turn() -> None:
    assert messages_of(USER, USER, said(text("a")), said(CALL), sent(RESULT), USER, system="s") == [
        ChatMessage("system", "s"),
        ChatMessage("user", "x\nx"),
        ChatMessage("assistant", "a", tool_calls=(ADD,)),
        ChatMessage("tool", "2", tool_call_id="abcdefghi"),
        ChatMessage("user", "x"),
    ]
    assert messages_of({"role": "system", "content": "b"}, USER, system="a")[0] == ChatMessage("system", "a\nb")


def test_thinking_text_and_calls_of_one_turn_become_one_message() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"}
    redacted = {"type": "redacted_thinking", "data": "x"}
    assert messages_of(USER, said(thought, redacted, text("I add."), CALL, CALL), sent(RESULT)) == [
        ChatMessage("user", "x"),
        ChatMessage("assistant", "I add.", tool_calls=(ADD, ADD), reasoning="Hm."),
        ChatMessage("tool", "2", tool_call_id="abcdefghi"),
    ]
    assert messages_of(said(thought, CALL, text("So."), {**thought, "signature": None}), USER)[0] == ChatMessage(
        "assistant", "So.", tool_calls=(ADD,), reasoning="Hm.\nHm."
    )
    assert messages_of(said(CALL), USER)[0] == ChatMessage("assistant", None, tool_calls=(ADD,))
    nothing = {"type": "thinking", "thinking": "", "signature": "x"}
    assert messages_of(said(nothing), USER)[0] == ChatMessage("assistant", "")


def test_results_and_texts_keep_their_order() -> None:
    parts = {**RESULT, "content": [text("2"), text("3")]}
    other = {"type": "tool_result", "tool_use_id": "b"}
    assert messages_of(sent(text("a"), RESULT, parts, text("b"), text("c"), other)) == [
        ChatMessage("user", "a"),
        ChatMessage("tool", "2", tool_call_id="abcdefghi"),
        ChatMessage("tool", "2\n3", tool_call_id="abcdefghi"),
        ChatMessage("user", "b\nc"),
        ChatMessage("tool", "", tool_call_id="b"),
    ]


def test_results_of_failed_calls_are_marked_as_errors() -> None:
    for failed, content, shown in (
        (True, "no file", "Error: no file"),
        (True, None, "Error"),
        (False, "no file", "no file"),
        (None, "no file", "no file"),
    ):
        (message,) = messages_of(sent({**RESULT, "content": content, "is_error": failed}))
        assert message.content == shown


def test_the_answer_continues_a_final_assistant_message() -> None:
    asked = conversation(USER, said(text("The answer is (")))
    assert (asked.continue_final_message, asked.add_generation_prompt) == (True, False)
    asked = conversation(USER)
    assert (asked.continue_final_message, asked.add_generation_prompt) == (False, True)


def test_thinking_and_effort_become_those_of_chats() -> None:
    assert conversation(USER).effort is None
    effort = conversation(USER, output_config={"effort": "low"}).effort
    assert effort is not None
    assert (effort.param, effort.value, effort.is_default) == ("output_config.effort", "low", False)
    effort = conversation(USER, output_config={"effort": "high"}).effort
    assert effort is not None
    assert effort.is_default
    disabled = conversation(USER, thinking={"type": "disabled"}, output_config={"effort": "max"}).effort
    assert disabled is not None
    assert (disabled.param, disabled.is_none, disabled.word) == ("thinking.type", True, "disabled")
    enabled = {"type": "enabled", "budget_tokens": 2000}
    assert conversation(USER, thinking=enabled).template_kwargs == {"enable_thinking": True}
    own = {"enable_thinking": False}
    assert conversation(USER, thinking=enabled, chat_template_kwargs=own).template_kwargs == own
    assert conversation(USER, thinking={"type": "adaptive"}).template_kwargs == {}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "narrator", "content": "x"}, "messages[1].role"),
        ({"role": "tool", "content": "x"}, "messages[1].role"),
        (sent(CALL), "messages[1].content[0].type"),
        (sent({"type": "thinking", "thinking": "Hm."}), "messages[1].content[0].type"),
        (said(text("a"), RESULT), "messages[1].content[1].type"),
        ({"role": "system", "content": [RESULT]}, "messages[1].content[0].type"),
        (said({**CALL, "name": "no spaces"}), "messages[1].content[0].name"),
        (said({**CALL, "caller": {"type": "code_execution"}}), "messages[1].content[0].caller"),
        (sent({**RESULT, "toolset_name": "t"}), "messages[1].content[0].toolset_name"),
        (sent(text("a", citations=[{"type": "page"}])), "messages[1].content[0].citations"),
        (sent({**RESULT, "content": [text("a", citations=[{}])]}), "messages[1].content[0].content[0].citations"),
        (said(CALL), "messages[1].content"),
        (said(text("a"), CALL), "messages[1].content"),
        (said(), "messages[1].content"),
        (said({"type": "thinking", "thinking": "Hm."}), "messages[1].content"),
    ],
)
def test_errors_name_the_field_at_fault(message: object, param: str) -> None:
    with pytest.raises(ServingError) as caught:
        messages_of(USER, message)
    assert caught.value.param == param
    assert param in caught.value.message


def test_a_number_out_of_range_is_refused() -> None:
    body = b'{"max_tokens":1,"messages":[{"role":"assistant","content":[%b]}]}'
    call = b'{"type":"tool_use","id":"a","name":"add","input":{"a":1e999}}'
    asked = msgspec.json.decode(body % call, type=MessagesRequest)
    with pytest.raises(ServingError, match="out of range") as caught:
        message_conversation(asked, [], LIMITS)
    assert caught.value.param == "messages[0].content[0].input"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "is empty"),
        ([USER] * 7, "has 7 messages; the limit is 6"),
        ([sent(*[RESULT] * 4), said(*[CALL] * 3), USER], "has 7 blocks; the limit is 6"),
        ([sent({**RESULT, "content": [text("")] * 7})], "has 7 blocks in tool results; the limit is 6"),
    ],
)
def test_the_numbers_of_messages_and_blocks_are_limited(messages: list[object], message: str) -> None:
    with pytest.raises(ServingError, match=message) as caught:
        messages_of(*messages)
    assert caught.value.param == "messages"
    with pytest.raises(ServingError, match="'system' has 7 blocks; the limit is 6"):
        messages_of(USER, system=[text("")] * 7)
