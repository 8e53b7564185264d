"""Whatever a model writes, chat completions, responses and messages report the same, streamed or not."""

import json
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraserve.serving.text.reasoning import ReasoningFormat
from loraserve.serving.tool_calls.formats import ToolCallFormat
from tests.integration import test_messages_api
from tests.integration.test_reasoning import ADD, CALL, TEMPLATE, TOKENIZER
from tests.integration.test_responses_api import events_of, without_call_ids
from tests.support.fake_engine_client import FakeEngine, make_model
from tests.support.live_server import live_server, make_settings

END = 1
FRAGMENTS = [
    *("<think>", "</think>", "</thi", "Hm.", "4", " ", "\n\n", "{", "}", "[", "]", '"', "\\", ","),
    *("<tool_call>", "</tool_call>", '{"name": "add", "arguments": {', '[{"name": "add", "parameters": {', '"a": 1'),
    *(CALL, '[{"name": "add", "parameters": {"a": 1}}]', '{"a": {"b": "</tool_call>"}}', "é", "x" * 130),
]
TOKENS = [TOKENIZER.encode(text, add_special_tokens=False).ids for text in FRAGMENTS]
ANSWERS = st.lists(st.sampled_from(TOKENS), max_size=10).map(lambda pieces: [*chain(*pieces), END])
CHOICES = st.sampled_from(["auto", "required", "none", {"type": "function", "function": {"name": "add"}}])
FIELDS = st.fixed_dictionaries(
    {"chat_template_kwargs": st.sampled_from([{}, {"mode": "begun"}, {"mode": "none"}])},
    optional={
        "stop": st.sampled_from(["1}", "Hm", "</think>\n", '"name', "xxx"]),
        "include_stop_str_in_output": st.booleans(),
        "min_tokens": st.integers(0, 9),
    },
)


class Said(NamedTuple):
    reasoning: str
    content: str
    calls: list[tuple[str, Any]]
    num_tokens: int
    num_reasoning_tokens: int


Asking = Callable[[list[int], int], httpx.Client]


@pytest.fixture(scope="module")
def asking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asking]:
    """Sets the model's answer and its tokens per step. A function, because hypothesis prints a test's arguments."""
    engine = FakeEngine(model=make_model(TOKENIZER, chat_template=TEMPLATE))
    parsers: Any = {"tool_call_parser": ToolCallFormat.HERMES, "reasoning_parser": ReasoningFormat.QWEN3}
    with (
        live_server(engine, make_settings(tmp_path_factory.mktemp("data"), **parsers)) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):

        def say(token_ids: list[int], num_at_once: int) -> httpx.Client:
            engine.reply = lambda asked, index: token_ids
            engine.tokens_per_step = num_at_once
            return http

        yield say


def chat(http: httpx.Client, asked: Any) -> tuple[Said, str]:
    body = http.post("/v1/chat/completions", json=asked).raise_for_status().json()
    (choice,), usage = body["choices"], body["usage"]
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    said = Said(message["reasoning"] or "", message["content"] or "", calls, *numbers_of(usage))
    return said, choice["finish_reason"]


def streamed_chat(http: httpx.Client, asked: Any) -> tuple[Said, str]:
    told = http.post("/v1/chat/completions", json=asked | {"stream": True, "stream_options": {"include_usage": True}})
    *blocks, done = told.raise_for_status().text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    *chunks, last = [json.loads(block.removeprefix("data: ")) for block in blocks]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    reasoning, content = (
        "".join(each["delta"].get(name) or "" for each in choices) for name in ("reasoning", "content")
    )
    calls: list[tuple[str, str]] = []
    for part in [part for choice in choices for part in choice["delta"].get("tool_calls") or []]:
        if part.get("id"):
            calls.append((part["function"]["name"], ""))
        assert part["index"] == len(calls) - 1
        name, arguments = calls.pop()
        calls.append((name, arguments + part["function"]["arguments"]))
    (reason,) = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return Said(reasoning, content, calls, *numbers_of(last["usage"])), reason


def numbers_of(usage: Any) -> tuple[int, int]:
    return usage["completion_tokens"], usage["completion_tokens_details"]["reasoning_tokens"]


def said_in(response: Any) -> Said:
    def texts_of(kind: str) -> str:
        parts = [part for item in response["output"] if item["type"] == kind for part in item["content"]]
        return "".join(part["text"] for part in parts)

    calls = [(item["name"], item["arguments"]) for item in response["output"] if item["type"] == "function_call"]
    usage = response["usage"]
    numbers = usage["output_tokens"], usage["output_tokens_details"]["reasoning_tokens"]
    return Said(texts_of("reasoning"), texts_of("message"), calls, *numbers)


@settings(max_examples=25, deadline=None)
@given(
    token_ids=ANSWERS,
    fields=FIELDS,
    choice=CHOICES,
    num_tokens=st.integers(9, 150),
    num_at_once=st.sampled_from([1, 2, 7, 1000]),
)
def test_all_apis_report_the_same_answer_streamed_or_not(
    asking: Asking, token_ids: list[int], fields: Any, choice: Any, num_tokens: int, num_at_once: int
) -> None:
    http = asking(token_ids, num_at_once)
    asked = {"model": "tiny", **fields, "request_id": "r"}
    said, reason = chat(http, in_chat := asked | of_chat(choice, num_tokens))
    assert streamed_chat(http, in_chat) == (said, reason)
    response = http.post("/v1/responses", json=(in_response := asked | of_response(choice, num_tokens)))
    whole = response.raise_for_status().json()
    events = events_of(http.post("/v1/responses", json=in_response | {"stream": True}).raise_for_status().text)
    assert without_call_ids(events[-1]["response"]) == without_call_ids(whole)
    assert said_in(whole) == said
    assert (whole["incomplete_details"] is not None) == (reason == "length")
    cut_off = [item for item in whole["output"] if item["status"] == "incomplete"]
    assert reason == "length" or {item["type"] for item in cut_off} <= {"function_call"}
    assert whole["status"] == ("incomplete" if reason == "length" or cut_off else "completed")
    assert reason != "tool_calls" or not cut_off
    message = http.post("/v1/messages", json=(in_message := asked | of_message(choice, num_tokens)))
    told = message.raise_for_status().json()
    events = test_messages_api.events_of(
        http.post("/v1/messages", json=in_message | {"stream": True}).raise_for_status().text
    )
    assert put_together(events) == without_ids(told)
    assert said_by(told) == said_as_message(said)
    has_called = bool(said.calls) and not cut_off
    if reason == "length":
        assert told["stop_reason"] == "max_tokens"
    elif has_called:
        assert told["stop_reason"] == "tool_use"
    else:
        is_stopped = told["stop_sequence"] is not None
        assert told["stop_reason"] == ("stop_sequence" if is_stopped else "end_turn")
        assert not is_stopped or told["stop_sequence"] == fields["stop"]


def said_as_message(said: Said) -> Said:
    """With the arguments as a message's `input` has them."""
    calls: list[tuple[str, Any]] = []
    for name, arguments in said.calls:
        try:
            given = json.loads(arguments or "{}")
        except json.JSONDecodeError:
            given = None
        calls.append((name, given if isinstance(given, dict) else {"INVALID_JSON": arguments}))
    return said._replace(calls=calls)


def said_by(message: Any) -> Said:
    def texts_of(kind: str) -> str:
        return "".join(block[kind] for block in message["content"] if block["type"] == kind)

    calls = [(block["name"], block["input"]) for block in message["content"] if block["type"] == "tool_use"]
    usage = message["usage"]
    numbers = usage["output_tokens"], usage["output_tokens_details"]["thinking_tokens"]
    return Said(texts_of("thinking"), texts_of("text"), calls, *numbers)


def put_together(events: list[Any]) -> Any:
    """The message that a stream's events add up to, without the ids of its calls."""
    start, *events, told, stop = events
    message, blocks = start["message"], []
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"] | {"written": ""})
            case "content_block_delta":
                assert event["index"] == len(blocks) - 1
                delta = event["delta"]
                for kind in ("text", "thinking", "signature"):
                    if kind in delta:
                        blocks[-1][kind] += delta[kind]
                blocks[-1]["written"] += delta.get("partial_json", "")
            case _:
                assert event == {"type": "content_block_stop", "index": len(blocks) - 1}
    for block in blocks:
        written = block.pop("written")
        if block["type"] == "tool_use":
            block["input"] = json.loads(written)
    assert stop == {"type": "message_stop"}
    return without_ids(message | {"content": blocks} | told["delta"] | {"usage": told["usage"]})


def without_ids(message: Any) -> Any:
    blocks = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return message | {"content": blocks}


def of_message(choice: Any, num_tokens: int) -> dict[str, Any]:
    kinds: Any = {"auto": "auto", "required": "any", "none": "none"}
    tool_choice = {"type": "tool", "name": "add"} if isinstance(choice, dict) else {"type": kinds[choice]}
    tools = [{"name": "add", "input_schema": ADD["function"]["parameters"]}]
    messages = [{"role": "user", "content": "2 + 2?"}]
    return {"messages": messages, "tools": tools, "tool_choice": tool_choice, "max_tokens": num_tokens}


def of_chat(choice: Any, num_tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": "2 + 2?"}]
    return {"messages": messages, "tools": [ADD], "tool_choice": choice, "max_tokens": num_tokens}


def of_response(choice: Any, num_tokens: int) -> dict[str, Any]:
    if isinstance(choice, dict):
        choice = {"type": "function", "name": "add"}
    tools = [{"type": "function", **ADD["function"]}]
    return {"input": "2 + 2?", "tools": tools, "tool_choice": choice, "max_output_tokens": num_tokens}
