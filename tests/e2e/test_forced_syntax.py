"""Forced calls in a format's own syntax: the real client on a real server, whose demo model knows no tools."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.conftest import TOOLS_TEMPLATE
from tests.support.demo_questions import user
from tests.support.server_process import WAIT_S, serve

DIGIT: Any = {"type": "integer", "minimum": 0, "maximum": 9}
PROPERTIES: Any = {"a": {"$ref": "#/$defs/Digit"}, "word": {"type": "string", "maxLength": 5}, "b": DIGIT}
PARAMETERS: Any = {"type": "object", "properties": PROPERTIES, "required": ["a", "b"], "$defs": {"Digit": DIGIT}}
TOOLS: Any = [
    {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED: Any = {"type": "function", "function": {"name": "add"}}
ASKED: Any = {"messages": user("2+2"), "tools": TOOLS, "max_tokens": 300, "temperature": 1.0}


@pytest.fixture(scope="module", params=["qwen3_coder", "lfm2"])
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("data")
    template = folder / "tools.jinja"
    template.write_text(TOOLS_TEMPLATE)
    with (
        serve(folder, "--chat-template", str(template), "--tool-call-parser", request.param) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=WAIT_S) as client,
    ):
        yield client


def check(name: str, arguments: str) -> None:
    given = json.loads(arguments)
    if name == "now":
        assert given == {}
        return
    assert name == "add"
    assert len(given.pop("word", "")) <= 5
    assert given.keys() == {"a", "b"}
    assert all(0 <= each <= 9 for each in given.values())


@pytest.mark.parametrize("model", ["loraserve-demo", "arithmetic"])
def test_required_calls_follow_the_schemas(client: openai.OpenAI, model: str) -> None:
    for seed in range(4):
        choice = client.chat.completions.create(
            **ASKED, model=model, seed=seed, tool_choice="required", parallel_tool_calls=False
        ).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        (call,) = choice.message.tool_calls or []
        assert call.type == "function"
        check(call.function.name, call.function.arguments)


def test_a_named_function_is_called_also_in_a_stream(client: openai.OpenAI) -> None:
    asked: Any = ASKED | {"model": "spell", "tool_choice": NAMED, "temperature": 0.0}
    whole = client.chat.completions.create(**asked).choices[0]
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert whole.message.tool_calls
    assert streamed.message.tool_calls
    for choice in (whole, streamed):
        assert (choice.finish_reason, choice.message.content) == ("stop", None)
        (call,) = choice.message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "add"
        check("add", call.function.arguments)
