"""/v1/responses through raw HTTP and the unmodified openai client, with a fake engine: events, items and failures."""

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from loraserve.engine.request import EngineRequest
from loraserve.serving.tool_calls.formats import ToolCallFormat
from tests.integration.test_tool_calls import ARGUMENTS, CUT_OFF, TEMPLATE, TOKENIZER, WRITTEN
from tests.support.fake_engine_client import FakeEngine, make_model
from tests.support.live_server import LiveServer, live_server, make_settings

EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
ADD: Any = {"type": "function", "name": "add", "parameters": {"type": "object", "required": ["b", "a"]}}
CALLING: Any = {"model": "calls", "input": "2 + 2?", "tools": [ADD]}
TEXT = "Just text."
UNFINISHED = WRITTEN[:-20]
NO_JSON = UNFINISHED.replace("[2.0", "[None")
ANSWERS = [TEXT, " \n", WRITTEN, f"I look. {WRITTEN}", f"{WRITTEN}\n{WRITTEN} That is it.", UNFINISHED, NO_JSON]


def says(*token_ids: int) -> Callable[[EngineRequest, int], list[int]]:
    return lambda asked, index: [*token_ids]


def tokens_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    engine = FakeEngine(model=make_model(TOKENIZER, chat_template=TEMPLATE))
    data_dir, parser = tmp_path_factory.mktemp("data"), ToolCallFormat.HERMES
    settings = make_settings(data_dir, tool_call_parser=parser, first_output_wait_s=0.1)
    with live_server(engine, settings, ("calls",)) as server:
        yield server


def whole(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    """The response, validated strictly against the client's types."""
    body = http.post("/v1/responses", json=fields).raise_for_status().json()
    Response.model_validate(body, strict=True)
    return body


def events_of(text: str) -> list[dict[str, Any]]:
    """Checks the events' names and numbers and validates each against the client's types."""
    blocks = [block.split("\n") for block in text.removesuffix("\n\n").split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name.removeprefix("event: ") for name, _ in blocks] == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENT.validate_python(event, strict=True)
    return events


def streamed(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    return events_of(http.post("/v1/responses", json={**fields, "stream": True}).raise_for_status().text)


def without_call_ids(response: dict[str, Any]) -> dict[str, Any]:
    """Call ids are random, and `created_at` varies."""
    items = [{name: value for name, value in item.items() if name != "call_id"} for item in response["output"]]
    return {**response, "output": items, "created_at": 0}


class TestAnswers:
    def test_text_is_answered_as_a_message(self, http: httpx.Client, answer: Callable[..., None]) -> None:
        answer(TEXT)
        response = whole(http, model="calls", input="x", request_id="r1", metadata={"a": "b"})
        assert (response["id"], response["status"], response["model"]) == ("resp_r1", "completed", "calls")
        assert response["metadata"] == {"a": "b"}
        assert response["output"] == [
            {
                "type": "message",
                "id": "msg_r1_0",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}],
            }
        ]
        usage = response["usage"]
        assert usage["output_tokens"] == len(tokens_of(TEXT)) + 1
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]

    def test_events_of_a_streamed_message(self, http: httpx.Client, answer: Callable[..., None]) -> None:
        answer(TEXT)
        events = streamed(http, model="calls", input="x")
        kinds = [event["type"].removeprefix("response.") for event in events]
        assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
        assert set(kinds[4:-4]) == {"output_text.delta"}
        assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
        assert "".join(event["delta"] for event in events[4:-4]) == TEXT
        assert events[-4]["text"] == TEXT
        assert {event["item_id"] for event in events if "item_id" in event} == {events[2]["item"]["id"]}
        assert (events[0]["response"]["status"], events[0]["response"]["usage"]) == ("in_progress", None)

    def test_events_of_streamed_calls(
        self, server: LiveServer, http: httpx.Client, answer: Callable[..., None]
    ) -> None:
        answer(f"Two: {WRITTEN}{WRITTEN}")
        events = streamed(http, **CALLING)
        message, *items = events[-1]["response"]["output"]
        assert message["content"][0]["text"] == "Two: "
        for index, item in enumerate(items, 1):
            begun, *deltas, done, ended = [event for event in events if event.get("output_index") == index]
            names = [event["type"].removeprefix("response.") for event in (begun, done, ended)]
            assert names == ["output_item.added", "function_call_arguments.done", "output_item.done"]
            assert {event["type"] for event in deltas} == {"response.function_call_arguments.delta"}
            assert len(deltas) > (0 if server.engine.tokens_per_step == 1000 else 5)
            assert "".join(event["delta"] for event in deltas) == done["arguments"] == ARGUMENTS
            assert (begun["item"]["arguments"], ended["item"]) == ("", item)
        assert len(items) == 2
        assert [(item["name"], item["arguments"], item["status"]) for item in items] == [
            ("add", ARGUMENTS, "completed")
        ] * 2
        assert len({item["call_id"] for item in items} | {item["id"] for item in items}) == 4

    @pytest.mark.parametrize(("text", "ended"), [("", True), *itertools.product(ANSWERS, (True, False))])
    @pytest.mark.parametrize("fields", [{}, {"tool_choice": "none"}, {"parallel_tool_calls": False}])
    def test_a_stream_ends_with_the_same_response_as_without_streaming(
        self, http: httpx.Client, answer: Callable[..., None], text: str, ended: bool, fields: dict[str, Any]
    ) -> None:
        answer(text, ended=ended)
        asked = {**CALLING, **fields, "request_id": "r1"}
        last = streamed(http, **asked)[-1]
        is_complete = ended and (text != UNFINISHED or fields == {"tool_choice": "none"})
        assert last["type"] == ("response.completed" if is_complete else "response.incomplete")
        response = whole(http, **asked)
        assert without_call_ids(last["response"]) == without_call_ids(response)
        assert response["incomplete_details"] == (None if ended else {"reason": "max_output_tokens"})
        last_item = response["output"][-1]
        is_whole = is_complete or last_item.get("arguments") == ARGUMENTS
        assert last_item["status"] == ("completed" if is_whole else "incomplete")

    @pytest.mark.parametrize(
        ("choice", "text"),
        [
            ("auto", WRITTEN),
            ("required", f'[{{"name": "add", "parameters": {ARGUMENTS}}}]'),
            ({"type": "function", "name": "add"}, ARGUMENTS),
        ],
    )
    def test_a_call_cut_off_by_a_stop_string_is_incomplete(
        self, http: httpx.Client, answer: Callable[..., None], choice: Any, text: str
    ) -> None:
        answer(text)
        asked: Any = {**CALLING, "tool_choice": choice, "request_id": "r1", "stop": ["🙂"]}
        last = streamed(http, **asked)[-1]
        assert last["type"] == "response.incomplete"
        response = whole(http, **asked)
        assert without_call_ids(last["response"]) == without_call_ids(response)
        assert (response["status"], response["incomplete_details"]) == ("incomplete", None)
        (call,) = response["output"]
        assert (call["status"], call["arguments"]) == ("incomplete", ARGUMENTS[: ARGUMENTS.index("🙂")])
        response = whole(http, **asked | {"stop": ["Observation:"]})
        assert (response["status"], response["incomplete_details"]) == ("completed", None)
        assert [(call["status"], call["arguments"]) for call in response["output"]] == [("completed", ARGUMENTS)]

    @pytest.mark.parametrize(("text", "arguments"), CUT_OFF)
    def test_a_required_call_cut_off_before_its_arguments_is_left_out(
        self, http: httpx.Client, answer: Callable[..., None], text: str, arguments: list[str]
    ) -> None:
        answer(text, ended=False)
        asked: Any = {**CALLING, "tool_choice": "required", "request_id": "r1"}
        response = whole(http, **asked)
        assert without_call_ids(streamed(http, **asked)[-1]["response"]) == without_call_ids(response)
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [item.get("arguments") or item["content"][0]["text"] for item in response["output"]] == (
            arguments or [""]
        )
        assert response["output"][-1]["status"] == ("completed" if arguments == [ARGUMENTS] else "incomplete")

    def test_logprobs(self, http: httpx.Client, answer: Callable[..., None]) -> None:
        answer("naïve 🙂")
        asked: Any = {"model": "calls", "input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
        told = whole(http, **asked)["output"][0]["content"][0]["logprobs"]
        assert len(told) == len(tokens_of("naïve 🙂")) + 1
        assert {len(token["top_logprobs"]) for token in told} == {2}
        events = streamed(http, **asked)
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        assert [token for event in deltas for token in event["logprobs"]] == told
        assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == told

    def test_the_clients_stream_helper_assembles_the_response(
        self, client: openai.OpenAI, answer: Callable[..., None]
    ) -> None:
        answer(f"I add. {WRITTEN}")
        with client.responses.stream(**CALLING) as stream:
            response = stream.get_final_response()
        assert response.output_text == "I add. "
        (call,) = [item for item in response.output if item.type == "function_call"]
        assert (call.name, json.loads(call.arguments)) == ("add", json.loads(ARGUMENTS))


class TestPrompts:
    def test_the_prompt_equals_that_of_a_chat_with_the_same_messages(
        self, server: LiveServer, http: httpx.Client
    ) -> None:
        call = {"type": "function_call", "call_id": "abcdefghi", "name": "add", "arguments": '{"b": 2}', "id": "fc_1"}
        result = {"type": "function_call_output", "call_id": "abcdefghi", "output": "4"}
        items = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "I add."}, call, result]
        function = {"name": "add", "arguments": '{"b": 2}'}
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "2 + 2?"},
            {"role": "assistant", "content": "I add.", "tool_calls": [{"id": "abcdefghi", "function": function}]},
            {"role": "tool", "tool_call_id": "abcdefghi", "content": "4"},
        ]
        kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
        fields: Any = {"instructions": "Be brief.", "max_output_tokens": 1, "tools": [ADD], **kwargs}
        whole(http, model="calls", input=items, **fields)
        tool = {"type": "function", "function": {name: ADD[name] for name in ("name", "parameters")}}
        tokens = http.post("/tokenize", json={"messages": messages, "tools": [tool], **kwargs}).json()["tokens"]
        assert server.engine.requests[-1].prompt_token_ids == tokens

    def test_context_length_errors_use_this_apis_field_names(self, http: httpx.Client) -> None:
        for text, limit, param, remedy in (
            ("x", 600, "max_output_tokens", "lower max_output_tokens"),
            ("x " * 600, 5, "input", "Shorten it."),
        ):
            response = http.post("/v1/responses", json={"model": "calls", "input": text, "max_output_tokens": limit})
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
            assert error["param"] == param
            assert remedy in error["message"]
            assert "prompt is too long" in error["message"], "LangChain recognizes these words"
        cut = {"truncate_prompt_tokens": -1, "input": "x " * 600, "max_output_tokens": 5}
        assert whole(http, model="calls", **cut)["usage"]["output_tokens"] == 5

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input[0].encrypted_content"),
            ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type"),
            ({"input": [{"role": "user", "content": "x", "colour": "red"}]}, "input[0].colour"),
            ({"tools": [{"type": "web_search", "external_web_access": False}]}, "tools[0].type"),
            ({"tools": [{"type": "function", "nmae": "add"}]}, "tools[0].nmae"),
            ({"metadata": {"a": 1}}, "metadata[...]"),
            ({"messages": []}, "messages"),
            ({"n": 2}, "n"),
            ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ],
    )
    def test_errors_name_the_invalid_field(self, http: httpx.Client, fields: dict[str, Any], param: str) -> None:
        response = http.post("/v1/responses", json={"model": "calls", "input": "x", **fields})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param


class TestTheRest:
    def test_an_adapter_is_served_at_its_own_path(self, http: httpx.Client) -> None:
        response = http.post("/adapters/calls/v1/responses", json={"input": "x", "max_output_tokens": 2})
        assert (response.status_code, response.json()["model"]) == (200, "calls")
        assert response.headers["x-adapter-version"] == "1"
        assert response.json()["id"] == f"resp_{response.headers['x-request-id']}"
        (newest, *_) = http.get("/v1/requests").json()["data"]
        assert (newest["route"], newest["adapter"], newest["num_output_tokens"]) == ("responses", "calls", 2)

    @pytest.mark.parametrize(
        ("method", "path"), [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")]
    )
    def test_responses_are_not_stored(self, http: httpx.Client, method: str, path: str) -> None:
        for prefix in ("", "/adapters/calls"):
            response = http.request(method, f"{prefix}/v1/responses/resp_1{path}")
            assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
            assert "Responses are not stored" in response.json()["error"]["message"]

    def test_input_tokens_are_counted_as_they_are_billed(
        self, server: LiveServer, http: httpx.Client, client: openai.OpenAI
    ) -> None:
        counted: Any = {**CALLING, "instructions": "Add.", "reasoning": {"summary": "auto"}}
        usage = client.responses.create(**counted).usage
        assert usage is not None
        num_admitted = len(http.get("/v1/requests").json()["data"])
        count = client.responses.input_tokens.count(**counted)
        assert (count.object, count.input_tokens) == ("response.input_tokens", usage.input_tokens)
        response = http.post("/adapters/calls/v1/responses/input_tokens", json=counted | {"max_output_tokens": 2})
        assert response.json() == {"object": "response.input_tokens", "input_tokens": usage.input_tokens}
        assert len(http.get("/v1/requests").json()["data"]) == num_admitted
        assert server.runtime.lifecycle.num_sequences == 0
        longer = client.responses.input_tokens.count(**counted | {"instructions": "Add. " * 2000})
        assert longer.input_tokens > server.engine.model.max_model_len

    @pytest.mark.parametrize(
        ("fields", "status", "param"),
        [
            ({"model": "nobody"}, 404, "model"),
            ({"input": []}, 400, "input"),
            ({"tools": [{"type": "web_search"}]}, 400, "tools[0].type"),
            ({"truncation": "auto"}, 400, "truncation"),
            ({"conversation": "conv_1"}, 400, "conversation"),
            ({"personality": "friendly"}, 400, "personality"),
        ],
    )
    def test_input_tokens_are_refused_as_the_response_would_be(
        self, http: httpx.Client, fields: dict[str, Any], status: int, param: str
    ) -> None:
        refused = [http.post(f"/v1/responses{path}", json=CALLING | fields) for path in ("/input_tokens", "")]
        assert [response.status_code for response in refused] == [status, status]
        assert refused[0].json() == refused[1].json()
        assert refused[0].json()["error"]["param"] == param

    def test_a_client_that_disconnects_stops_its_request(self, server: LiveServer, client: openai.OpenAI) -> None:
        server.engine.step_s = 0.01
        try:
            with client.responses.create(model="calls", input="x", stream=True) as stream:
                next(event for event in stream if event.type == "response.output_text.delta")
            server.wait_until(lambda: not server.engine.running and server.runtime.lifecycle.num_sequences == 0)
        finally:
            server.engine.step_s = 0.0


class TestFailures:
    def test_a_stream_aborted_by_request_id_ends_with_error_events(
        self, server: LiveServer, http: httpx.Client
    ) -> None:
        server.engine.gate = asyncio.Event()
        try:
            body = {"model": "calls", "input": "x", "stream": True, "request_id": "r1"}
            with http.stream("POST", "/v1/responses", json=body) as response:
                lines = response.iter_lines()
                begun = list(itertools.islice(lines, 6))
                assert begun[0] == "event: response.created"
                own_id = next(found["id"] for found in http.get("/v1/requests?state=running").json()["data"])
                assert http.delete(f"/v1/requests/{own_id}").is_success
                server.call(server.engine.gate.set)
                *_, error, failed = events_of("\n".join([*begun, *lines]) + "\n")
        finally:
            server.engine.gate = None
        assert (error["type"], error["code"]) == ("error", "request_aborted")
        assert (failed["type"], failed["response"]["id"]) == ("response.failed", "resp_r1")

    def test_an_error_during_a_stream_is_sent_as_events(self, tmp_path: Path) -> None:
        engine = FakeEngine(model=make_model(TOKENIZER), fail_with="the logits are not finite")
        engine.reply = says(*tokens_of(TEXT), 1)
        with (
            live_server(engine, make_settings(tmp_path)) as server,
            httpx.Client(base_url=server.url, timeout=10) as http,
        ):
            events = streamed(http, model="tiny", input="x")
            error, failed = events[-2:]
            assert (error["type"], error["code"]) == ("error", "engine_error")
            assert error["message"] == failed["response"]["error"]["message"] == "the logits are not finite"
            assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
            response = http.post("/v1/responses", json={"model": "tiny", "input": "x"})
            assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_error")

    def test_an_error_before_the_first_token_keeps_its_status(self, tmp_path: Path) -> None:
        engine = FakeEngine(model=make_model(TOKENIZER), error="the engine ended")
        with live_server(engine, make_settings(tmp_path)) as server:
            response = httpx.post(f"{server.url}/v1/responses", json={"model": "tiny", "input": "x", "stream": True})
            assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_dead")
