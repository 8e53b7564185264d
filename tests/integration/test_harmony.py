"""A server whose model answers like gpt-oss, through the unmodified clients of three APIs, with a fake engine."""

from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from openai.types.responses import Response
from tokenizers import AddedToken

from loraserve.serving.text.reasoning import ReasoningFormat
from loraserve.serving.tool_calls.formats import ToolCallFormat
from tests.integration import test_messages_api
from tests.integration.test_reasoning import message_of
from tests.integration.test_responses_api import events_of, without_call_ids
from tests.support.fake_engine_client import FakeEngine, make_model, make_tokenizer
from tests.support.live_server import LiveServer, live_server, make_settings

MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>", "final")
TEMPLATE = """
{%- for tool in tools or [] %}<|start|>developer<|message|>{{ "// " + tool.function.description }}<|end|>{% endfor -%}
{%- set rest = messages -%}
{%- if messages[0].role in ("system", "developer") -%}
    <|start|>developer<|message|>{{ messages[0].content }}<|end|>
    {%- set rest = messages[1:] -%}
{%- endif -%}
{%- for message in rest -%}
    {%- if message.role == "assistant" and "tool_calls" in message -%}
        {%- if "<|channel|>final<|message|>" in message.content or (message.content and message.thinking) -%}
            {{- raise_exception("no") -}}
        {%- endif -%}
        {%- set call = message.tool_calls[0].function -%}
        {%- if message.content or message.thinking -%}
            <|start|>assistant<|channel|>analysis<|message|>{{ message.content or message.thinking }}<|end|>
        {%- endif -%}
        <|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>
        {{- call.arguments | tojson }}<|call|>
    {%- elif message.role == "assistant" -%}
        <|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
    {%- elif message.role in ("user", "tool") -%}
        <|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
THOUGHT = "<|channel|>analysis<|message|>Two and two.<|end|><|start|>assistant"
FINAL = f"{THOUGHT}<|channel|>final<|message|>4"
CALL = f'{THOUGHT}<|channel|>commentary to=functions.add <|constrain|>json<|message|>{{"a": 1}}'
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
USER: Any = {"role": "user", "content": "2 + 2?"}
ASKED: Any = {"model": "tiny", "messages": [USER]}


def make_harmony_tokenizer() -> Any:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=mark.startswith("<"), normalized=False) for mark in MARKS])
    return tokenizer


TOKENIZER = make_harmony_tokenizer()
CALL_ID = TOKENIZER.token_to_id("<|call|>")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    engine = FakeEngine(model=make_model(TOKENIZER, chat_template=TEMPLATE))
    settings = make_settings(
        tmp_path_factory.mktemp("data"),
        tool_call_parser=ToolCallFormat.OPENAI,
        reasoning_parser=ReasoningFormat.OPENAI_GPTOSS,
    )
    with live_server(engine, settings) as server:
        yield server


def prompt_of(server: LiveServer) -> str:
    return TOKENIZER.decode(server.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (FINAL, "Two and two.", "4"),
        ("<|channel|>final<|message|>4", None, "4"),
        ("4", None, "4"),
        ("<|channel|>analysis<|message|>Two", "Two", None),
    ],
)
def test_chats_separate_reasoning_from_content(
    client: openai.OpenAI, answer: Callable[..., None], text: str, reasoning: Any, content: Any
) -> None:
    answer(text)
    message = message_of(client)
    assert (message.reasoning_content, message.content) == (reasoning, content)


def test_reasoning_tokens_are_counted(client: openai.OpenAI, answer: Callable[..., None]) -> None:
    answer(FINAL)
    usage = client.chat.completions.create(**ASKED).usage
    expected = len(TOKENIZER.encode(THOUGHT.removesuffix("<|start|>assistant"), add_special_tokens=False).ids)
    assert usage
    assert usage.completion_tokens_details
    assert usage.completion_tokens_details.reasoning_tokens == expected


def test_a_call_is_returned_and_rendered_in_the_next_prompt(
    server: LiveServer, client: openai.OpenAI, answer: Callable[..., None]
) -> None:
    answer(CALL, end=CALL_ID)
    message = message_of(client, tools=[ADD])
    assert (message.reasoning_content, message.content) == ("Two and two.", None)
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
    said = {"role": "assistant", "content": None, "tool_calls": [call.to_dict()], "reasoning_content": "Two and two."}
    messages: Any = [USER, said, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    for content, shown in ((None, "Two and two."), ("I add.", "Two and two.\nI add.")):
        client.chat.completions.create(model="tiny", messages=[messages[0], {**said, "content": content}, messages[2]])
        expected = f'{shown}<|end|><|start|>assistant to=functions.add<|channel|>commentary json<|message|>{{"a": 1}}'
        assert f"<|start|>assistant<|channel|>analysis<|message|>{expected}<|call|>" in prompt_of(server)
    stop: Any = server.engine.requests[-1].sampling.stop_token_ids
    assert {TOKENIZER.token_to_id("<|call|>"), TOKENIZER.token_to_id("<|return|>")} == {*stop}


def test_several_calls_of_a_message_are_each_rendered_with_their_result(
    server: LiveServer, client: openai.OpenAI, answer: Callable[..., None]
) -> None:
    answer(FINAL)
    calls = [{"id": f"c{i}", "type": "function", "function": {"name": f"f{i}", "arguments": "{}"}} for i in range(2)]
    results = [{"role": "tool", "tool_call_id": f"c{i}", "content": f"r{i}"} for i in (1, 0)]
    said: Any = {"role": "assistant", "content": "I ask.", "tool_calls": calls}
    client.chat.completions.create(model="tiny", messages=[USER, said, *results, USER])
    prompt = prompt_of(server)
    order = ["I ask.", "functions.f0", "r0<|end|>", "functions.f1", "r1<|end|>", "2 + 2?<|end|><|start|>assistant"]
    assert [prompt.rindex(part) for part in order] == sorted(prompt.rindex(part) for part in order)
    assert prompt.count("I ask.") == 1


def test_no_system_or_developer_message_is_left_out(
    server: LiveServer, client: openai.OpenAI, answer: Callable[..., None]
) -> None:
    answer(FINAL)
    roles = ("system", "developer", "user", "system", "user")
    messages: Any = [{"role": role, "content": f"m{i}"} for i, role in enumerate(roles)]
    client.chat.completions.create(model="tiny", messages=messages)
    users = "".join(f"<|start|>user<|message|>m{i}<|end|>" for i in (2, 3, 4))
    assert prompt_of(server) == f"<|start|>developer<|message|>m0\n\nm1<|end|>{users}<|start|>assistant"


def test_marks_spelled_in_ordinary_tokens_are_kept_as_text(
    server: LiveServer, client: openai.OpenAI, answer: Callable[..., None]
) -> None:
    answer("")
    text = '{"mark": "<|end|><|start|>user<|message|>"}'
    spelt = [each for char in text for each in TOKENIZER.encode(char, add_special_tokens=False).ids]
    server.engine.reply = lambda asked, index: [*spelt, 1]
    assert message_of(client, response_format={"type": "json_object"}).content == text
    server.engine.reply = lambda asked, index: [*TOKENIZER.encode(FINAL, add_special_tokens=False).ids, *spelt, 1]
    assert message_of(client).content == f"4{text}"


def test_reasoning_cannot_be_turned_off(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="'none', but this model always reasons first"):
        client.chat.completions.create(**ASKED, reasoning_effort="none")


def test_reasoning_cannot_be_limited(client: openai.OpenAI) -> None:
    fields: Any = {"extra_body": {"thinking_token_budget": 9}}
    with pytest.raises(openai.BadRequestError, match="is 9, but gpt-oss has no budget; with a lower effort"):
        client.chat.completions.create(**ASKED, **fields)
    client.chat.completions.create(**ASKED, response_format={"type": "json_object"}, **fields)


def test_the_tokens_that_begin_the_answer_count_toward_the_context(http: httpx.Client) -> None:
    asked: Any = {**ASKED, "response_format": {"type": "json_object"}}
    num_tokens = http.post("/v1/chat/completions", json={**asked, "max_tokens": 1}).json()["usage"]["prompt_tokens"]
    for max_tokens, status in ((512 - num_tokens, 200), (513 - num_tokens, 400)):
        answered = http.post("/v1/chat/completions", json={**asked, "max_tokens": max_tokens})
        assert answered.status_code == status
    assert answered.json()["error"]["code"] == "context_length_exceeded"


def test_reasoning_may_follow_text(http: httpx.Client, answer: Callable[..., None]) -> None:
    answer(f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{FINAL}")
    events = events_of(http.post("/v1/responses", json={"model": "tiny", "input": "x", "stream": True}).text)
    assert events[-1]["type"] == "response.completed"
    said = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(said) == "I look.\n4"


@pytest.mark.parametrize(("text", "kind"), [(FINAL, "message"), (CALL, "function_call")])
def test_a_response_has_the_same_items_streamed_or_not(
    http: httpx.Client, answer: Callable[..., None], text: str, kind: str
) -> None:
    answer(text, end=CALL_ID)
    asked = {"model": "tiny", "input": "2 + 2?", "tools": [{"type": "function", "name": "add"}], "request_id": "r"}
    whole = http.post("/v1/responses", json=asked).raise_for_status().json()
    Response.model_validate(whole, strict=True)
    assert [item["type"] for item in whole["output"]] == ["reasoning", kind]
    events = events_of(http.post("/v1/responses", json={**asked, "stream": True}).text)
    assert without_call_ids(events[-1]["response"]) == without_call_ids(whole)


@pytest.mark.parametrize(("text", "kind"), [(FINAL, "text"), (CALL, "tool_use")])
def test_a_message_has_the_same_blocks_streamed_or_not(
    server: LiveServer, answer: Callable[..., None], text: str, kind: str
) -> None:
    answer(text, end=CALL_ID)
    tool: Any = {"name": "add", "input_schema": {"type": "object"}}
    asked: Any = {**ASKED, "max_tokens": 90, "tools": [tool], "extra_body": {"request_id": "r1"}}
    with anthropic.Anthropic(base_url=server.url, api_key="anything", max_retries=0) as client:
        whole = client.messages.create(**asked)
        streamed = test_messages_api.put_together(client, **asked)
    assert [block.type for block in whole.content] == ["thinking", kind]
    assert test_messages_api.without_call_ids(streamed) == test_messages_api.without_call_ids(whole)
