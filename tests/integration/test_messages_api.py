"""/v1/messages through raw HTTP and the unmodified anthropic client, with a fake engine."""

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from loraserve.serving.settings import RequestLimits
from loraserve.serving.tool_calls.formats import ToolCallFormat
from tests.integration.test_responses_api import NO_JSON, UNFINISHED, says, tokens_of
from tests.integration.test_tool_calls import ARGUMENTS, TEMPLATE, TOKENIZER, WRITTEN
from tests.support.fake_engine_client import FakeEngine, make_model
from tests.support.live_server import LiveServer, live_server, make_settings

EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
ADD: Any = {"name": "add", "input_schema": {"type": "object", "required": ["b", "a"]}}
EAGER: Any = {**ADD, "eager_input_streaming": True}
USER: Any = {"role": "user", "content": "2 + 2?"}
ASKED: Any = {"model": "calls", "messages": [USER], "max_tokens": 300}
CALLING: Any = {**ASKED, "tools": [ADD]}
TEXT = "Just text."
KEY, OTHER = "a-key-from-the-command-line", "another-one"
ANSWERS = [TEXT, " \n", WRITTEN, f"I look. {WRITTEN}", f"{WRITTEN}\n{WRITTEN} That is it.", UNFINISHED, NO_JSON]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    engine = FakeEngine(model=make_model(TOKENIZER, chat_template=TEMPLATE))
    data_dir, parser = tmp_path_factory.mktemp("data"), ToolCallFormat.HERMES
    settings = make_settings(data_dir, tool_call_parser=parser, first_output_wait_s=0.1)
    with live_server(engine, settings, ("calls",)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="anything", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    settings = make_settings(tmp_path_factory.mktemp("locked"))
    with live_server(FakeEngine(), settings, flag_keys=(KEY, OTHER)) as server:
        yield server


def whole(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    """An answer, validated strictly against the client's types."""
    body = http.post("/v1/messages", json=fields).raise_for_status().json()
    Message.model_validate(body, strict=True)
    return body


def events_of(text: str) -> list[dict[str, Any]]:
    """Checks the events' names and validates each event strictly against the client's types."""
    blocks = [block.split("\n") for block in text.removesuffix("\n\n").split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name.removeprefix("event: ") for name, _ in blocks] == [event["type"] for event in events]
    for event in events:
        if event["type"] != "error":
            EVENT.validate_python(event, strict=True)
    return events


def streamed(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    return events_of(http.post("/v1/messages", json={**fields, "stream": True}).raise_for_status().text)


def without_call_ids(message: Any) -> dict[str, Any]:
    """As JSON, without fields that are null; the ids are random."""
    told = json.loads(message.to_json(exclude_none=True))
    blocks = [{name: value for name, value in block.items() if name != "id"} for block in told["content"]]
    return {**told, "content": blocks}


def put_together(client: anthropic.Anthropic, **fields: Any) -> Any:
    with client.messages.stream(**fields) as stream:
        return stream.get_final_message()


class TestAnswers:
    def test_an_answer_has_the_fields_of_a_message(self, http: httpx.Client, answer: Callable[..., None]) -> None:
        answer(TEXT)
        message = whole(http, **ASKED, request_id="r1")
        usage = message.pop("usage")
        assert message == {
            "type": "message",
            "id": "msg_r1",
            "role": "assistant",
            "model": "calls",
            "content": [{"type": "text", "text": TEXT}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
        }
        assert usage == {
            "input_tokens": usage["input_tokens"],
            "output_tokens": len(tokens_of(TEXT)) + 1,
            "cache_read_input_tokens": 0,
            "cache_creation_input_tokens": 0,
        }

    def test_a_stream_has_the_events_of_a_message(self, http: httpx.Client, answer: Callable[..., None]) -> None:
        answer(TEXT)
        begun, block, *pieces, done, told, end = streamed(http, **ASKED, request_id="r1")
        message = begun["message"]
        assert (begun["type"], message["id"], message["content"]) == ("message_start", "msg_r1", [])
        assert (message["stop_reason"], message["usage"]["output_tokens"]) == (None, 0)
        assert block == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        assert "".join(piece["delta"]["text"] for piece in pieces) == TEXT
        assert done == {"type": "content_block_stop", "index": 0}
        assert told["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
        assert told["usage"] == message["usage"] | {"output_tokens": len(tokens_of(TEXT)) + 1}
        assert end == {"type": "message_stop"}

    def test_a_calls_input_is_streamed_in_one_piece_unless_its_tool_is_eager(
        self, server: LiveServer, http: httpx.Client, answer: Callable[..., None]
    ) -> None:
        answer(f"Two: {WRITTEN}{WRITTEN}")
        for tool, least in ((ADD, 1), (EAGER, 1 if server.engine.tokens_per_step == 1000 else 5)):
            events = streamed(http, **CALLING | {"tools": [tool]})
            ids: set[str] = set()
            for index in (1, 2):
                begun, *pieces, done = [event for event in events if event.get("index") == index]
                block = begun["content_block"]
                assert (block["type"], block["name"], block["input"]) == ("tool_use", "add", {})
                assert block["id"].startswith("toolu_")
                ids.add(block["id"])
                assert len(pieces) >= least
                assert least > 1 or len(pieces) == 1
                written = "".join(piece["delta"]["partial_json"] for piece in pieces)
                assert json.loads(written) == json.loads(ARGUMENTS)
                assert done["type"] == "content_block_stop"
            assert len(ids) == 2
            assert events[-2]["delta"]["stop_reason"] == "tool_use"

    @pytest.mark.parametrize(("text", "ended"), [("", True), *itertools.product(ANSWERS, (True, False))])
    @pytest.mark.parametrize(
        "fields",
        [{}, {"tool_choice": {"type": "none"}}, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}],
    )
    def test_the_clients_stream_helper_assembles_the_message_that_is_returned_without_streaming(
        self,
        client: anthropic.Anthropic,
        answer: Callable[..., None],
        text: str,
        ended: bool,
        fields: dict[str, Any],
    ) -> None:
        answer(text, ended=ended)
        asked = {**CALLING, **fields, "extra_body": {"request_id": "r1"}}
        message = client.messages.create(**asked)
        assert without_call_ids(put_together(client, **asked)) == without_call_ids(message)
        may_call = fields.get("tool_choice") != {"type": "none"}
        has_called = may_call and (WRITTEN in text or text == NO_JSON)
        assert message.stop_reason == ("max_tokens" if not ended else "tool_use" if has_called else "end_turn")
        calls = [block for block in message.content if block.type == "tool_use"]
        for call in calls:
            is_whole = call.input == json.loads(ARGUMENTS)
            assert is_whole or call.input == {"INVALID_JSON": call.input.get("INVALID_JSON")}
            assert is_whole == (WRITTEN in text)
        assert len(calls) == (0 if not may_call else text.count("<tool_call>") if not fields else min(1, len(calls)))

    def test_arguments_that_are_not_a_json_object_are_returned_as_invalid_json(
        self, client: anthropic.Anthropic, answer: Callable[..., None]
    ) -> None:
        answer(UNFINISHED)
        for message in (client.messages.create(**CALLING), put_together(client, **CALLING)):
            (call,) = message.content
            written = call.input["INVALID_JSON"]
            assert ARGUMENTS.startswith(written)
            assert written
            assert message.stop_reason == "end_turn"

    @pytest.mark.parametrize(
        ("choice", "text"),
        [
            ({"type": "auto"}, WRITTEN),
            ({"type": "any"}, f'[{{"name": "add", "parameters": {ARGUMENTS}}}]'),
            ({"type": "tool", "name": "add"}, ARGUMENTS),
        ],
    )
    def test_a_call_cut_off_by_a_stop_sequence_does_not_stop_with_tool_use(
        self, client: anthropic.Anthropic, answer: Callable[..., None], choice: Any, text: str
    ) -> None:
        answer(text)
        asked: Any = {**CALLING, "tool_choice": choice, "stop_sequences": ["🙂"]}
        for message in (client.messages.create(**asked), put_together(client, **asked)):
            assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "🙂")
            (call,) = message.content
            assert call.input == {"INVALID_JSON": ARGUMENTS[: ARGUMENTS.index("🙂")]}
        for message in (
            client.messages.create(**asked | {"stop_sequences": ["Observation:"]}),
            put_together(client, **asked | {"stop_sequences": ["Observation:"]}),
        ):
            assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
            assert [call.input for call in message.content] == [json.loads(ARGUMENTS)]

    def test_the_stop_sequence_that_ended_the_answer_is_reported(
        self, client: anthropic.Anthropic, answer: Callable[..., None]
    ) -> None:
        answer(TEXT)
        asked: Any = {**ASKED, "stop_sequences": ["none", " text"]}
        for message in (client.messages.create(**asked), put_together(client, **asked)):
            assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " text")
            assert message.content[0].text == "Just"
        message = client.messages.create(**ASKED, extra_body={"stop": " text"})
        assert message.stop_sequence == " text"

    def test_max_tokens_may_exceed_the_room_left_in_the_context(
        self, client: anthropic.Anthropic, answer: Callable[..., None]
    ) -> None:
        answer("x" * 600, ended=False)
        asked: Any = {**ASKED, "max_tokens": 32_000}
        message = put_together(client, **asked)
        assert message.stop_reason == "model_context_window_exceeded"
        assert message.usage.input_tokens + message.usage.output_tokens == 512
        assert put_together(client, **asked | {"max_tokens": 3}).stop_reason == "max_tokens"


class TestPrompts:
    def test_the_prompt_equals_that_of_a_chat_with_the_same_messages(
        self, server: LiveServer, http: httpx.Client, client: anthropic.Anthropic
    ) -> None:
        cached: Any = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
        call: Any = {"type": "tool_use", "id": "toolu_abcdefghi", "name": "add", "input": {"b": 2}, **cached}
        result: Any = {"type": "tool_result", "tool_use_id": "toolu_abcdefghi", "content": "4", **cached}
        asked: Any = {
            "model": "calls",
            "system": [{"type": "text", "text": "Be brief.", **cached}],
            "messages": [
                USER,
                {"role": "assistant", "content": [{"type": "text", "text": "I add."}, call]},
                {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
            ],
            "tools": [{**ADD, **cached}],
        }
        kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
        function = {"name": "add", "arguments": '{"b": 2}'}
        messages = [
            {"role": "system", "content": "Be brief."},
            USER,
            {"role": "assistant", "content": "I add.", "tool_calls": [{"id": "abcdefghi", "function": function}]},
            {"role": "tool", "tool_call_id": "abcdefghi", "content": "4"},
            {"role": "user", "content": "So?"},
        ]
        tool = {"type": "function", "function": {"name": "add", "parameters": ADD["input_schema"]}}
        tokens = http.post("/tokenize", json={"messages": messages, "tools": [tool], **kwargs}).json()["tokens"]
        thinking: Any = {"thinking": {"type": "disabled"}}
        usage = client.messages.create(**asked, **thinking, max_tokens=1).usage
        assert server.engine.requests[-1].prompt_token_ids == tokens
        counted = client.messages.count_tokens(**asked, **thinking).input_tokens
        assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0) == len(tokens)

    def test_an_answer_can_be_sent_back_in_the_next_request(
        self, client: anthropic.Anthropic, answer: Callable[..., None]
    ) -> None:
        for text in (WRITTEN, UNFINISHED, f"I look. {WRITTEN}", TEXT, ""):
            answer(text)
            messages: Any = [USER]
            for message in (client.messages.create(**CALLING), put_together(client, **CALLING)):
                messages.append({"role": "assistant", "content": message.content})
                results: Any = [
                    {"type": "tool_result", "tool_use_id": block.id, "content": "no", "is_error": True}
                    for block in message.content
                    if block.type == "tool_use"
                ]
                messages.append({"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]})
            assert client.messages.create(**CALLING | {"messages": messages}).usage.input_tokens > 0

    def test_an_answer_continues_a_final_assistant_message(
        self, server: LiveServer, client: anthropic.Anthropic, http: httpx.Client
    ) -> None:
        said: Any = {"role": "assistant", "content": "The best answer is ("}
        client.messages.create(**ASKED | {"messages": [USER, said], "max_tokens": 1})
        goes_on = {"add_generation_prompt": False, "continue_final_message": True}
        tokens = http.post("/tokenize", json={"messages": [USER, said], **goes_on}).json()["tokens"]
        assert server.engine.requests[-1].prompt_token_ids == tokens

    def test_a_prompt_that_does_not_fit_is_refused_in_words_that_claude_code_recognizes(
        self, client: anthropic.Anthropic
    ) -> None:
        long: Any = {**ASKED, "messages": [{"role": "user", "content": "x " * 600}]}
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d{3,4} tokens > 511 maximum"):
            client.messages.create(**long)
        for num_tokens, fits in ((511, True), (512, False)):
            spare = num_tokens - client.messages.count_tokens(model="calls", messages=[USER]).input_tokens
            full: Any = {**ASKED, "messages": [{"role": "user", "content": USER["content"] + "~" * spare}]}
            if fits:
                assert client.messages.create(**full).usage.output_tokens == 1
            else:
                with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 512 tokens > 511 maximum"):
                    client.messages.create(**full)
        cut = client.messages.create(**long | {"max_tokens": 5}, extra_body={"truncate_prompt_tokens": -1})
        assert cut.usage.output_tokens == 5

    @pytest.mark.parametrize(
        ("fields", "named"),
        [
            ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "content[0].type"),
            ({"messages": [{"role": "user", "content": "x", "colour": "red"}]}, "messages[0].colour"),
            ({"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 1}]}, "tools[0].type"),
            ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
            ({"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}, "mcp_servers"),
            ({"container": "c"}, "container"),
            ({"n": 2}, "Unknown parameter: 'n'"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"max_tokens": None}, "max_tokens"),
            ({"stop_sequences": [""]}, "stop_sequences"),
            ({"service_tier": "flex"}, "service_tier"),
            ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ],
    )
    def test_errors_name_the_field_at_fault(self, http: httpx.Client, fields: dict[str, Any], named: str) -> None:
        for path in ("/v1/messages", "/adapters/calls/v1/messages"):
            response = http.post(path, json={**ASKED, **fields})
            assert response.status_code == 400, response.text
            error = response.json()
            assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
            assert named in error["error"]["message"]
            assert error["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]

    def test_a_thread_is_refused_with_the_error_that_lets_clients_continue_without_it(self, http: httpx.Client) -> None:
        for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
            error = http.post("/v1/messages", json={**ASKED, "thread": thread}).json()["error"]
            assert "send the messages so far" in error["message"]
            assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        assert "details" not in http.post("/v1/messages", json={**ASKED, "speed": "fast"}).json()["error"]

    def test_count_tokens_takes_no_max_tokens(self, http: httpx.Client, client: anthropic.Anthropic) -> None:
        counted: Any = {"model": "calls", "messages": [USER]}
        for path in ("/v1", "/adapters/calls/v1"):
            response = http.post(f"{path}/messages/count_tokens", json=counted)
            assert response.json() == {"input_tokens": client.messages.count_tokens(**counted).input_tokens}
            assert "request-id" in response.headers
        with pytest.raises(anthropic.NotFoundError):
            client.messages.count_tokens(**counted | {"model": "nobody"})
        response = http.post("/v1/messages/count_tokens", json={**counted, "max_tokens": 1})
        assert (response.status_code, "max_tokens" in response.json()["error"]["message"]) == (400, True)


class TestTheRest:
    def test_an_adapters_own_path_serves_messages(self, http: httpx.Client) -> None:
        response = http.post("/adapters/calls/v1/messages", json={"messages": [USER], "max_tokens": 2})
        assert (response.status_code, response.json()["model"]) == (200, "calls")
        assert response.headers["x-adapter-version"] == "1"
        assert response.json()["id"] == f"msg_{response.headers['x-request-id']}"
        (newest, *_) = http.get("/v1/requests").json()["data"]
        assert (newest["route"], newest["adapter"], newest["num_output_tokens"]) == ("messages", "calls", 2)

    def test_the_beta_client_and_its_extra_fields_are_accepted(
        self, client: anthropic.Anthropic, answer: Callable[..., None]
    ) -> None:
        answer(TEXT)
        asked: Any = {
            **ASKED,
            "betas": ["context-management-2025-06-27", "interleaved-thinking-2025-05-14"],
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "metadata": {"user_id": "user_1"},
            "service_tier": "auto",
            "thinking": {"type": "adaptive"},
            "output_config": {"effort": "high"},
        }
        assert client.beta.messages.create(**asked).content[0].text == TEXT  # pyright: ignore[reportAttributeAccessIssue]
        with client.beta.messages.stream(**asked) as stream:
            assert stream.get_final_text() == TEXT

    @pytest.mark.parametrize(
        ("fields", "user"),
        [
            ({}, None),
            ({"metadata": {}}, None),
            ({"metadata": {"user_id": "a"}}, "a"),
            ({"metadata": {"user_id": "a"}, "user": "b"}, "b"),
            ({"metadata": {"user_id": "a"}, "user": "b", "safety_identifier": "c"}, "c"),
        ],
    )
    def test_a_canary_sticks_to_the_user_that_the_request_names(
        self,
        server: LiveServer,
        http: httpx.Client,
        monkeypatch: pytest.MonkeyPatch,
        fields: dict[str, Any],
        user: str | None,
    ) -> None:
        resolver, asked_for = type(server.control.resolver), []
        usual = resolver.resolve

        async def resolve(*args: Any, **named: Any) -> Any:
            asked_for.append(named["user"])
            return await usual(*args, **named)

        monkeypatch.setattr(resolver, "resolve", resolve)
        whole(http, **ASKED | {"max_tokens": 1}, **fields)
        assert asked_for == [user]

    def test_a_client_disconnect_stops_the_work(self, server: LiveServer, client: anthropic.Anthropic) -> None:
        server.engine.step_s = 0.01
        try:
            with client.messages.create(**ASKED, stream=True) as stream:
                next(event for event in stream if event.type == "content_block_delta")
            server.wait_until(lambda: not server.engine.running and server.runtime.lifecycle.num_sequences == 0)
        finally:
            server.engine.step_s = 0.0


class TestFailures:
    def test_a_stream_whose_request_is_deleted_ends_with_an_error_event(
        self, server: LiveServer, http: httpx.Client
    ) -> None:
        server.engine.gate = asyncio.Event()
        try:
            with http.stream("POST", "/v1/messages", json={**ASKED, "stream": True}) as response:
                lines = response.iter_lines()
                begun = list(itertools.islice(lines, 3))
                assert begun[0] == "event: message_start"
                own_id = next(found["id"] for found in http.get("/v1/requests?state=running").json()["data"])
                assert http.delete(f"/v1/requests/{own_id}").is_success
                server.call(server.engine.gate.set)
                start, error = events_of("\n".join([*begun, *lines]) + "\n")
        finally:
            server.engine.gate = None
        assert start["message"]["usage"]["input_tokens"] > 0
        assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
        assert error["request_id"] == response.headers["request-id"]

    def test_an_error_during_a_stream_is_reported_in_it(self, tmp_path: Path) -> None:
        engine = FakeEngine(model=make_model(TOKENIZER), fail_with="the logits are not finite")
        engine.reply = says(*tokens_of(TEXT), 1)
        asked: Any = {**ASKED, "model": "tiny"}
        with (
            live_server(engine, make_settings(tmp_path)) as server,
            anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client,
        ):
            with pytest.raises(anthropic.APIStatusError, match="the logits are not finite") as caught:
                put_together(client, **asked)
            assert caught.value.body["error"]["type"] == "api_error"  # pyright: ignore
            with pytest.raises(anthropic.InternalServerError, match="the logits are not finite"):
                client.messages.create(**asked)

    def test_an_error_before_the_first_token_keeps_its_status(self, tmp_path: Path) -> None:
        engine = FakeEngine(model=make_model(TOKENIZER), error="the engine ended")
        with live_server(engine, make_settings(tmp_path)) as server:
            response = httpx.post(f"{server.url}/v1/messages", json={**ASKED, "model": "tiny", "stream": True})
            assert (response.status_code, response.json()["error"]["type"]) == (503, "overloaded_error")

    def test_a_body_that_is_too_large_or_not_valid_json_is_refused(self, tmp_path: Path) -> None:
        settings = make_settings(tmp_path, limits=RequestLimits(max_body_bytes=1000))
        with live_server(FakeEngine(), settings) as server, httpx.Client(base_url=server.url) as http:
            for body, status, kind in (
                (json.dumps({**ASKED, "system": "x" * 1000}), 413, "request_too_large"),
                ("{", 400, "invalid_request_error"),
                ("[" * 100 + "]" * 100, 400, "invalid_request_error"),
            ):
                response = http.post("/v1/messages", content=body, headers={"content-type": "application/json"})
                assert (response.status_code, response.json()["error"]["type"]) == (status, kind)


class TestKeys:
    @pytest.mark.parametrize(
        "headers",
        [
            {"x-api-key": KEY},
            {"authorization": f"Bearer {KEY}"},
            {"authorization": f"Bearer {KEY}", "x-api-key": KEY},
            {"authorization": "Basic eDp5", "x-api-key": KEY},
            {"authorization": "Bearer", "x-api-key": KEY},
        ],
    )
    def test_a_key_is_accepted_in_either_header(self, locked: LiveServer, headers: dict[str, str]) -> None:
        asked = {"model": "tiny", "messages": [USER], "max_tokens": 1}
        response = httpx.post(f"{locked.url}/v1/messages", json=asked, headers=headers)
        assert response.status_code == 200, response.text

    @pytest.mark.parametrize(
        "headers",
        [
            {},
            {"x-api-key": "wrong"},
            {"x-api-key": ""},
            {"authorization": f"Bearer {KEY}", "x-api-key": OTHER},
            {"authorization": f"Bearer {KEY}", "x-api-key": "wrong"},
            {"authorization": "Bearer wrong", "x-api-key": KEY},
        ],
    )
    def test_missing_wrong_and_conflicting_keys_are_refused_in_the_apis_own_format(
        self, locked: LiveServer, headers: dict[str, str]
    ) -> None:
        for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions"):
            response = httpx.post(f"{locked.url}{path}", json={"model": "tiny", "messages": [USER]}, headers=headers)
            assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")
            assert ("request_id" in response.json()) == ("messages" in path)
            assert not any(key in response.text for key in (KEY, OTHER))

    def test_the_anthropic_client_can_send_the_key_either_way(self, locked: LiveServer) -> None:
        asked: Any = {"model": "tiny", "messages": [USER], "max_tokens": 1}
        for given in ({"api_key": KEY}, {"auth_token": KEY}):
            with anthropic.Anthropic(base_url=locked.url, max_retries=0, **given) as client:
                assert client.messages.create(**asked).usage.output_tokens == 1
        with (
            anthropic.Anthropic(base_url=locked.url, max_retries=0, api_key="wrong") as client,
            pytest.raises(anthropic.AuthenticationError),
        ):
            client.messages.create(**asked)
