"""/v1/responses of a real server, called by the unmodified openai client."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai.types.responses import ResponseFunctionToolCall
from pydantic import BaseModel, Field

from tests.support.demo_questions import ADAPTERS, BASE
from tests.support.server_process import WAIT_S, ServerProcess

GREEDY: Any = {"temperature": 0, "max_output_tokens": 40}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
ADD: Any = {
    "type": "function",
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"a": DIGIT, "b": DIGIT},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "strict": True,
}


IMAGE = {"type": "input_image", "image_url": "data:,"}


class Person(BaseModel, extra="forbid"):
    name: str = Field(max_length=8)
    kind: Literal["cat", "dog"]


@pytest.fixture(scope="module")
def tools_client(tools_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tools_server.url}/v1", api_key="x", max_retries=0, timeout=WAIT_S) as client:
        yield client


def test_adapters_answer_a_text_input(client: openai.OpenAI) -> None:
    answers = {"uppercase": "HELLO WORLD", "reverse": "dlrow olleh", "rot13": "uryyb jbeyq"}
    assert set(answers) < set(ADAPTERS)
    for adapter, text in answers.items():
        response = client.responses.create(model=adapter, input="hello world", **GREEDY)
        assert (response.output_text, response.status, response.model) == (text, "completed", adapter)
        assert response.usage is not None
        assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


def test_the_tokens_of_an_input_are_counted(client: openai.OpenAI) -> None:
    asked: Any = {"model": "uppercase", "instructions": "Be loud.", "input": "hello world"}
    usage = client.responses.create(**asked, **GREEDY).usage
    assert usage is not None
    assert client.responses.input_tokens.count(**asked).input_tokens == usage.input_tokens


def test_an_answer_equals_that_of_a_chat(client: openai.OpenAI) -> None:
    chat: Any = client.chat.completions.create(
        model="rot13", messages=[{"role": "user", "content": "a dog"}], temperature=0, max_tokens=40
    )
    items: Any = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a dog"}]}]
    response = client.responses.create(model="rot13", input=items, **GREEDY)
    assert response.output_text == chat.choices[0].message.content
    assert response.usage is not None
    assert response.usage.output_tokens == chat.usage.completion_tokens


def test_a_stream_has_numbered_events_and_the_whole_text(client: openai.OpenAI) -> None:
    events = [*client.responses.create(model="uppercase", input="hello world", stream=True, **GREEDY)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "HELLO WORLD"
    first, last = events[0], events[-1]
    assert first.type == "response.created"
    assert last.type == "response.completed"
    assert (last.response.output_text, last.response.id) == ("HELLO WORLD", first.response.id)


def test_a_truncated_answer_is_reported_as_incomplete(client: openai.OpenAI) -> None:
    asked: Any = {"model": "uppercase", "input": "hello world", "temperature": 0, "max_output_tokens": 3}
    response = client.responses.create(**asked)
    assert (response.status, response.output_text) == ("incomplete", "HEL")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    last = [*client.responses.create(**asked, stream=True)][-1]
    assert last.type == "response.incomplete"


def test_logprobs_are_returned_on_request(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="uppercase", input="hi", include=["message.output_text.logprobs"], top_logprobs=2, **GREEDY
    )
    (item,) = response.output
    assert item.type == "message"
    assert item.content[0].type == "output_text"
    logprobs = item.content[0].logprobs or []
    assert [token.token for token in logprobs[:2]] == ["H", "I"]
    assert [token.top_logprobs[0].token for token in logprobs[:2]] == ["H", "I"]


@pytest.mark.parametrize("model", [BASE, "spell"])
def test_an_answer_is_parsed_into_its_type(client: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "input": "hello world", "max_output_tokens": 200, "text_format": Person}
    assert isinstance(client.responses.parse(**asked).output_parsed, Person)
    with client.responses.stream(**asked) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Person)


def called(response: Any) -> ResponseFunctionToolCall:
    (call,) = response.output
    assert isinstance(call, ResponseFunctionToolCall)
    arguments = json.loads(call.arguments)
    assert set(arguments) == {"a", "b"}
    assert all(0 <= value <= 9 for value in arguments.values())
    return call


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "add"}])
def test_a_required_call_is_made_and_the_conversation_continues(tools_client: openai.OpenAI, choice: Any) -> None:
    history: Any = [{"role": "user", "content": "2+2"}]
    asked: Any = {
        "model": "arithmetic",
        "tools": [ADD],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_output_tokens": 200,
    }
    call = called(tools_client.responses.create(input=history, **asked))
    with tools_client.responses.stream(input=history, **asked) as stream:
        streamed = stream.get_final_response()
    called(streamed)
    history += [call, {"type": "function_call_output", "call_id": call.call_id, "output": "4"}]
    goes_on: Any = asked | {"tool_choice": "none"}
    answer = tools_client.responses.create(input=history, **goes_on)
    assert [item.type for item in answer.output] == ["message"]
    history += [*answer.output, *streamed.output, {"role": "user", "content": "thanks"}]
    assert tools_client.responses.create(input=history, **goes_on).usage


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"store": True}, "store", "stores nothing"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send their items with 'input'"),
        ({"background": True}, "background", "Answers are not stored"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search'"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0]", "input_image"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "takes no reasoning effort"),
        ({"truncation": "auto"}, "truncation", "truncate_prompt_tokens"),
    ],
)
def test_unsupported_fields_are_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.responses.create(**{"model": "uppercase", "input": "x", **fields})
    assert (caught.value.param, caught.value.code) == (param, "unsupported_parameter")


def test_responses_are_not_stored(client: openai.OpenAI, data_dir: Path) -> None:
    response = client.responses.create(model="uppercase", input="a secret", **GREEDY)
    with pytest.raises(openai.NotFoundError, match="Responses are not stored"):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError, match="Responses are not stored"):
        client.responses.delete(response.id)
    files = [path.read_bytes() for path in data_dir.rglob("*") if path.is_file()]
    assert files
    assert not any(b"a secret" in file or b"A SECRET" in file for file in files)
