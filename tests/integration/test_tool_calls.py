"""Tools, their calls and results, through the unmodified openai client and raw HTTP, with a fake engine."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.support.fake_engine_client import FakeEngine, make_model, make_tokenizer
from tests.support.live_server import LiveServer, live_server, make_settings

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is false %}<quiet>{% endif %}{% endif %}"
)
TOKENIZER = make_tokenizer()
USER: Any = {"role": "user", "content": "2 + 2?"}
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "required": ["b", "a"]}}}
CALL: Any = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": '{"b": 2, "a": 2}'}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Its model's answers are `server.engine.reply`."""
    engine = FakeEngine(model=make_model(TOKENIZER, chat_template=TEMPLATE))
    with live_server(engine, make_settings(tmp_path_factory.mktemp("data")), ("calls",)) as server:
        yield server


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=10) as client:
        yield client


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="anything", max_retries=0) as client:
        yield client


def prompt_of(http: httpx.Client, **fields: Any) -> str:
    """As /tokenize has it."""
    tokens = http.post("/tokenize", json={"messages": [USER], **fields}).json()["tokens"]
    return http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]


class TestPrompts:
    def test_tools_calls_and_results_are_rendered(self, http: httpx.Client) -> None:
        calling = {"role": "assistant", "content": None, "tool_calls": [CALL]}
        result = {"role": "tool", "tool_call_id": "abcdefghi", "content": [{"type": "text", "text": "4"}]}
        prompt = prompt_of(http, messages=[USER, calling, result], tools=[ADD])
        assert prompt == (
            f"{json.dumps(ADD)}\n<|user|>2 + 2?<|end|>\n"
            '<|assistant|><tool_call>{"name": "add", "arguments": {"b": 2, "a": 2}}</tool_call><|end|>\n'
            "<|tool|>4<|end|>\n<|assistant|>"
        )

    def test_a_chat_begins_with_what_tokenize_says(self, server: LiveServer, client: openai.OpenAI) -> None:
        fields: Any = {"chat_template_kwargs": {"enable_thinking": False}}
        client.chat.completions.create(model="calls", messages=[USER], max_tokens=1, extra_body=fields)
        with httpx.Client(base_url=server.url) as http:
            tokens = http.post("/tokenize", json={"messages": [USER], **fields}).json()["tokens"]
            assert prompt_of(http, **fields).endswith("<|assistant|><quiet>")
        assert server.engine.requests[-1].prompt_token_ids == tokens

    def test_no_choice_of_tools_shows_none(self, server: LiveServer, client: openai.OpenAI, http: httpx.Client) -> None:
        client.chat.completions.create(
            model="calls", messages=[USER], tools=[ADD], tool_choice="none", parallel_tool_calls=False, max_tokens=1
        )
        tokens = http.post("/tokenize", json={"messages": [USER]}).json()["tokens"]
        assert server.engine.requests[-1].prompt_token_ids == tokens

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
            ({"chat_template_kwargs": {"a": "x" * 20_000}}, "chat_template_kwargs"),
            ({"chat_template_kwargs": []}, "chat_template_kwargs"),
            ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
            (
                {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
                "tools[0].function.parameters",
            ),
            ({"tools": [ADD] * 129}, "tools"),
            ({"tools": [{"type": "function", "function": {"name": "a", "description": "x" * 300_000}}]}, "tools"),
            ({"messages": [{"role": "tool", "content": "4"}]}, "messages[0].tool_call_id"),
        ],
    )
    @pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
    def test_what_is_at_fault_is_named(self, http: httpx.Client, path: str, fields: dict[str, Any], param: str) -> None:
        response = http.post(path, json={"model": "calls", "messages": [USER], **fields})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == param

    @pytest.mark.parametrize("fields", [{"tools": [ADD]}, {"chat_template_kwargs": {"a": 1}}])
    def test_only_messages_are_rendered(self, http: httpx.Client, fields: dict[str, Any]) -> None:
        response = http.post("/tokenize", json={"prompt": "x", **fields})
        assert response.status_code == 400
        assert response.json()["error"]["param"] in fields
