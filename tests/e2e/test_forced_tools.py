"""Forced tool calls: the real client on a real server whose template shows tools."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.demo_questions import user
from tests.support.server_process import WAIT_S, ServerProcess

ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/Digit"}, "b": {"$ref": "#/$defs/Digit"}},
            "required": ["a", "b"],
            "additionalProperties": False,
            "$defs": {"Digit": {"type": "integer", "minimum": 0, "maximum": 9}},
        },
    },
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
NAMED: Any = {"type": "function", "function": {"name": "add"}}
ASKED: Any = {"messages": user("2+2"), "tools": [ADD, NOW], "max_tokens": 200, "temperature": 1.0}


@pytest.fixture(scope="module")
def client(tools_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tools_server.url}/v1", api_key="x", max_retries=0, timeout=WAIT_S) as client:
        yield client


def check(name: str, arguments: str) -> None:
    given = json.loads(arguments)
    assert name in ("add", "now")
    assert given == {} if name == "now" else set(given) == {"a", "b"} and all(0 <= each <= 9 for each in given.values())


@pytest.mark.parametrize("model", ["loraserve-demo", "arithmetic", "spell"])
def test_required_calls_use_the_given_tools(client: openai.OpenAI, model: str) -> None:
    for seed in range(4):
        choice = client.chat.completions.create(
            **ASKED, model=model, seed=seed, tool_choice="required", parallel_tool_calls=False
        ).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        (call,) = choice.message.tool_calls or []
        check(call.function.name, call.function.arguments)


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_function_is_called(client: openai.OpenAI, stream: bool) -> None:
    asked = ASKED | {"model": "arithmetic", "tool_choice": NAMED}
    if not stream:
        choice = client.chat.completions.create(**asked).choices[0]
        (call,) = choice.message.tool_calls or []
        assert choice.finish_reason == "stop"
        check(call.function.name, call.function.arguments)
        return
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    parts = [part.function for chunk in chunks for part in chunk.delta.tool_calls or []]
    assert "".join(part.name or "" for part in parts if part) == "add"
    check("add", "".join(part.arguments or "" for part in parts if part))
    assert [chunk.delta.content for chunk in chunks if chunk.delta.content] == []
    assert chunks[-1].finish_reason == "stop"


def test_an_agents_format_for_its_final_answer_does_not_apply_to_a_forced_call(client: openai.OpenAI) -> None:
    """OpenAI's Agents SDK and the AI SDK send the format with every request, also with one that must call a tool."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "sum", "schema": {"type": "integer"}}}
    choice = client.chat.completions.create(
        **ASKED, model="arithmetic", tool_choice=NAMED, response_format=form
    ).choices[0]
    (call,) = choice.message.tool_calls or []
    check("add", call.function.arguments)
    assert choice.message.content is None


def test_a_truncated_call_shows_partial_arguments_only_for_a_named_function(client: openai.OpenAI) -> None:
    asked = ASKED | {"model": "spell", "temperature": 0.0}
    short: Any = client.chat.completions.create(**asked | {"max_tokens": 4}, tool_choice="required").choices[0]
    assert (short.finish_reason, short.message.tool_calls, short.message.content) == ("length", None, "")
    whole: Any = client.chat.completions.create(**asked, tool_choice=NAMED).choices[0]
    short = client.chat.completions.create(**asked | {"max_tokens": 4}, tool_choice=NAMED).choices[0]
    assert (short.finish_reason, short.message.content) == ("length", None)
    arguments = short.message.tool_calls[0].function.arguments
    assert whole.message.tool_calls[0].function.arguments.startswith(arguments)
    assert arguments


def test_the_conversation_continues_after_a_call(client: openai.OpenAI) -> None:
    message = client.chat.completions.create(**ASKED, model="spell", tool_choice=NAMED).choices[0].message
    (call,) = message.tool_calls or []
    history: Any = [*user("2+2"), message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "4"}]
    answer = client.chat.completions.create(
        model="spell", messages=history, tools=[ADD, NOW], tool_choice="none", max_tokens=5
    )
    assert answer.choices[0].message.tool_calls is None


def test_a_parameter_schema_without_a_type_that_cannot_be_followed_is_refused(client: openai.OpenAI) -> None:
    unique = {"type": "array", "uniqueItems": True}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": unique}}}}
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        client.chat.completions.create(**ASKED | {"tools": [tool]}, model="spell", tool_choice="required")


def test_a_parameter_schema_that_cannot_be_followed_is_refused_naming_tool_choice(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as refused:
        client.chat.completions.create(**ASKED | {"tools": [tool]}, model="spell", tool_choice="required")
    assert refused.value.param == "tool_choice"
