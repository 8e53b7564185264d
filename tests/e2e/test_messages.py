"""/v1/messages of a real server, called by the unmodified anthropic client."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import openai
import pytest
from anthropic.types import Message, ToolUseBlock
from pydantic import BaseModel

from tests.support.demo_questions import ADAPTERS, BASE, user
from tests.support.server_process import WAIT_S, ServerProcess

GREEDY: Any = {"max_tokens": 40, "extra_body": {"temperature": 0}}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
ADD: Any = {
    "name": "add",
    "input_schema": {
        "type": "object",
        "properties": {"a": DIGIT, "b": DIGIT},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Pet(BaseModel, extra="forbid"):
    """Without lengths: Anthropic's client moves them into descriptions, which do not constrain an answer."""

    name: Literal["Ada", "Bob"]
    kind: Literal["cat", "dog"]


@pytest.fixture(scope="module")
def claude(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0, timeout=WAIT_S) as client:
        yield client


@pytest.fixture(scope="module")
def tools_claude(tools_server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=tools_server.url, api_key="x", max_retries=0, timeout=WAIT_S) as client:
        yield client


def text_of(message: Any) -> str:
    (block,) = message.content
    assert block.type == "text"
    return block.text


def test_adapters_answer_whole_and_streamed(claude: anthropic.Anthropic) -> None:
    answers = {"uppercase": "HELLO WORLD", "reverse": "dlrow olleh", "rot13": "uryyb jbeyq"}
    assert set(answers) < set(ADAPTERS)
    for adapter, text in answers.items():
        asked: Any = {"model": adapter, "messages": user("hello world"), **GREEDY}
        message = claude.messages.create(**asked)
        assert (text_of(message), message.stop_reason, message.model) == (text, "end_turn", adapter)
        with claude.messages.stream(**asked) as stream:
            assert "".join(stream.text_stream) == text
            assert stream.get_final_message().stop_reason == "end_turn"
        at_its_path = claude.with_options(base_url=f"{str(claude.base_url).rstrip('/')}/adapters/{adapter}")
        assert text_of(at_its_path.messages.create(**asked)) == text


def test_an_answer_equals_that_of_a_chat_and_counted_tokens_match_its_usage(
    claude: anthropic.Anthropic, client: openai.OpenAI
) -> None:
    chat: Any = client.chat.completions.create(model="rot13", messages=user("a dog"), temperature=0, max_tokens=40)
    blocks: Any = [{"role": "user", "content": [{"type": "text", "text": "a dog"}]}]
    message = claude.messages.create(model="rot13", messages=blocks, **GREEDY)
    assert text_of(message) == chat.choices[0].message.content
    usage = message.usage
    assert usage.output_tokens == chat.usage.completion_tokens
    num_input_tokens = usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert num_input_tokens == chat.usage.prompt_tokens
    assert claude.messages.count_tokens(model="rot13", messages=blocks).input_tokens == num_input_tokens


def test_cached_tokens_are_reported_separately(claude: anthropic.Anthropic) -> None:
    asked: Any = {"model": "uppercase", "messages": user("the same words " * 20), **GREEDY}
    first, second = (claude.messages.create(**asked).usage for _ in range(2))
    assert (second.cache_read_input_tokens or 0) > 0
    assert second.input_tokens + (second.cache_read_input_tokens or 0) == first.input_tokens


def test_the_stop_reason_says_why_an_answer_ended(claude: anthropic.Anthropic) -> None:
    asked: Any = {"model": "uppercase", "messages": user("hello world"), "extra_body": {"temperature": 0}}
    message = claude.messages.create(max_tokens=3, **asked)
    assert (message.stop_reason, text_of(message)) == ("max_tokens", "HEL")
    message = claude.messages.create(max_tokens=40, stop_sequences=["O W"], **asked)
    assert (message.stop_reason, message.stop_sequence, text_of(message)) == ("stop_sequence", "O W", "HELL")
    message = claude.messages.create(max_tokens=1_000_000, timeout=WAIT_S, **asked)
    assert (message.stop_reason, text_of(message)) == ("end_turn", "HELLO WORLD")


@pytest.mark.parametrize("model", [BASE, "spell"])
def test_an_answer_is_parsed_into_its_type(claude: anthropic.Anthropic, model: str) -> None:
    asked: Any = {"model": model, "messages": user("hello world"), "max_tokens": 200, "output_format": Pet}
    assert isinstance(claude.messages.parse(**asked).parsed_output, Pet)
    with claude.messages.stream(**asked) as stream:
        assert isinstance(stream.get_final_message().parsed_output, Pet)


def called(message: Any) -> ToolUseBlock:
    (call,) = message.content
    assert isinstance(call, ToolUseBlock)
    assert message.stop_reason == "tool_use"
    assert set(call.input) == {"a", "b"}
    assert all(isinstance(value, int) and 0 <= value <= 9 for value in call.input.values())
    return call


@pytest.mark.parametrize("kind", [{"type": "any"}, {"type": "tool", "name": "add"}])
def test_a_required_call_is_made_and_the_conversation_continues(tools_claude: anthropic.Anthropic, kind: Any) -> None:
    history: Any = user("2+2")
    choice = {**kind, "disable_parallel_tool_use": True}
    asked: Any = {"model": "arithmetic", "tools": [ADD], "tool_choice": choice, "max_tokens": 200}
    message: Message = tools_claude.messages.create(messages=history, **asked)
    called(message)
    with tools_claude.messages.stream(messages=history, **asked) as stream:
        streamed: Any = stream.get_final_message()
    called(streamed)
    goes_on: Any = asked | {"tool_choice": {"type": "none"}}
    for said in (message, streamed):
        result = {"type": "tool_result", "tool_use_id": called(said).id, "content": [{"type": "text", "text": "4"}]}
        history = [*history, {"role": "assistant", "content": said.content}, {"role": "user", "content": [result]}]
        answer = tools_claude.messages.create(messages=history, **goes_on)
        assert answer.stop_reason != "tool_use"


def test_the_anthropic_clients_tool_runner_executes_the_models_calls(tools_claude: anthropic.Anthropic) -> None:
    found: list[tuple[int, int]] = []

    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Adds two numbers."""
        found.append((a, b))
        return json.dumps(a + b)

    runner = tools_claude.beta.messages.tool_runner(
        model="arithmetic",
        max_tokens=100,
        messages=user("2+2"),
        tools=[add],
        tool_choice={"type": "tool", "name": "add"},
        max_iterations=2,
    )
    reasons = [message.stop_reason for message in runner]
    assert reasons == ["tool_use", "tool_use"]
    assert found


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "nobody"}, "'nobody' does not exist"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "is 'image'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "'thinking.display'"),
        ({"output_config": {"effort": "low"}}, "takes no reasoning effort"),
        ({"max_tokens": 0}, "'max_tokens' is 0"),
    ],
)
def test_unsupported_and_invalid_fields_are_refused_by_name(
    claude: anthropic.Anthropic, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises((anthropic.BadRequestError, anthropic.NotFoundError), match=message) as caught:
        claude.messages.create(**{"model": "uppercase", "messages": user("x"), "max_tokens": 9, **fields})
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["type"] == "error"
    assert caught.value.request_id == caught.value.body["request_id"]
