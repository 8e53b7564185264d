import asyncio
import json

import pytest
from aiohttp import web

from loraserve.cli import async_http_client as http
from loraserve.cli.loadtest.client import RequestResult, RequestStyle, send
from loraserve.cli.loadtest.plan import PlannedRequest
from loraserve.cli.loadtest.server_kind import ServerKind
from tests.support.loopback import Handler, client_of, stream

REQUEST = PlannedRequest("a", [11, 12], prompt_tokens=2, max_tokens=3, at_s=0.0)
TOKEN = {"choices": [{"text": "x"}]}
CHAT = RequestStyle(chat=True)
DONE = [b"data: [DONE]\n\n"]


def events(*payloads: object) -> list[bytes]:
    return [b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n" for payload in payloads]


def usage(prompt: int, completion: int, **more: object) -> dict[str, object]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion, **more}}


def answer(chunks: list[bytes], status: int = 200, style: RequestStyle | None = None) -> RequestResult:
    return ask(lambda request: stream(request, chunks, status), style)


def ask(handler: Handler, style: RequestStyle | None = None) -> RequestResult:
    async def send_one() -> RequestResult:
        async with client_of(handler) as client:
            return await send(client, style or RequestStyle(), REQUEST)

    return asyncio.run(send_one())


def test_a_stream_is_timed_and_tokens_are_taken_from_its_usage() -> None:
    result = answer(events(TOKEN, TOKEN, TOKEN, usage(2, 3)) + DONE)
    assert result.failure is None
    assert (result.prompt_tokens, result.output_tokens, result.cached_tokens) == (2, 3, None)
    assert len(result.gaps_s) == 2
    assert result.ttft_s is not None
    assert result.e2e_s is not None
    assert result.e2e_s >= result.ttft_s > 0


def test_the_first_token_of_a_chat_is_its_first_reasoning_and_not_the_role_delta() -> None:
    deltas = ({"role": "assistant"}, {"reasoning_content": "x"}, {"reasoning_content": "y"}, {"content": "z"}, {})
    result = answer(events(*({"choices": [{"delta": delta}]} for delta in deltas), usage(2, 3)) + DONE, style=CHAT)
    assert (result.failure, len(result.gaps_s)) == (None, 2)
    assert result.ttft_s is not None


def test_cached_tokens_are_read_from_prompt_tokens_details() -> None:
    details = {"prompt_tokens_details": {"cached_tokens": 1}}
    assert answer(events(TOKEN, usage(2, 3, **details))).cached_tokens == 1


def test_events_in_one_chunk_count_once_and_usage_may_be_split_across_chunks() -> None:
    whole = b"".join(events(TOKEN, TOKEN, TOKEN, usage(2, 3)) + DONE)
    result = answer([whole[:-40], whole[-40:]])
    assert result.failure is None
    assert result.gaps_s == []


def test_the_last_of_several_usages_counts() -> None:
    # LoRAX: counts are zero until the last chunk, which has the true counts and output.
    chunks = [{"choices": [{"text": "x"}], "usage": {"prompt_tokens": 0, "completion_tokens": 0}}] * 2
    last = {"choices": [{"text": "x"}], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}
    result = answer(events(*chunks, last))
    assert (result.failure, result.output_tokens, len(result.gaps_s)) == (None, 3, 2)


@pytest.mark.parametrize(
    ("chunks", "status", "code", "message"),
    [
        (events(TOKEN, usage(2, 1)), 200, "tokens", "1 tokens arrived, 3 were requested"),
        (events(TOKEN, usage(5, 3)), 200, "tokens", "the server counted 5 prompt tokens, 2 were sent"),
        (events(TOKEN), 200, "no usage", "the stream ended without usage"),
        (events(TOKEN, {"error": {"message": "died", "code": "engine_dead"}}), 200, "stream engine_dead", "died"),
        ([b'{"error":{"message":"no such model"}}'], 404, "HTTP 404", "no such model"),
    ],
)
def test_failures_are_returned_as_results(chunks: list[bytes], status: int, code: str, message: str) -> None:
    failure = answer(chunks, status).failure
    assert failure is not None
    assert (failure.code, failure.message) == (code, message)


def test_the_body_is_json_and_no_compression_is_requested() -> None:
    asked: list[tuple[str, str, object]] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        headers = request.headers
        asked.append((headers["content-type"], headers["accept-encoding"], json.loads(await request.read())))
        return await stream(request, events(TOKEN, usage(2, 3)))

    assert ask(handle).failure is None
    assert asked == [("application/json", "identity", RequestStyle().body(REQUEST))]


def test_a_redirect_is_not_followed() -> None:
    failure = ask(lambda request: stream(request, [b"moved"], 307)).failure
    assert failure is not None
    assert (failure.code, failure.message) == ("HTTP 307", "moved")


@pytest.mark.parametrize("chunks", [[], events(TOKEN)])
def test_a_connection_lost_before_or_during_the_answer_is_a_result(chunks: list[bytes]) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = await stream(request, chunks) if chunks else web.StreamResponse()
        assert request.transport is not None
        request.transport.close()
        return response

    failure = ask(handle).failure
    assert failure is not None
    assert failure.code == "connection"
    assert failure.message.startswith("ClientPayloadError: " if chunks else "ServerDisconnectedError: ")


def test_a_refused_connection_is_a_result(refusing_port: int) -> None:
    async def send_one() -> RequestResult:
        async with http.async_http_client(f"http://127.0.0.1:{refusing_port}", None) as client:
            return await send(client, RequestStyle(), REQUEST)

    failure = asyncio.run(send_one()).failure
    assert failure is not None
    assert failure.code == "connection"
    assert failure.message.startswith("ClientConnectorError: ")


def test_a_silent_server_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "TIMEOUT_S", 0.05)

    async def send_one() -> RequestResult:
        given_up = asyncio.Event()

        async def handle(request: web.Request) -> web.StreamResponse:
            response = await stream(request, events(TOKEN))
            await given_up.wait()
            return response

        async with client_of(handle) as client:
            result = await send(client, RequestStyle(), REQUEST)
            given_up.set()
            return result

    failure = asyncio.run(send_one()).failure
    assert failure is not None
    assert (failure.code, failure.message.split(":")[0]) == ("timeout", "SocketTimeoutError")


@pytest.mark.parametrize(
    ("kind", "extras"),
    [
        (ServerKind.LORASERVE, {"ignore_eos": True, "min_tokens": 3}),
        (ServerKind.VLLM, {"ignore_eos": True, "min_tokens": 3}),
        (ServerKind.LORAX, {"ignore_eos_token": True}),
        (ServerKind.OPENAI, {}),
    ],
)
def test_only_fields_that_the_server_knows_are_sent(kind: ServerKind, extras: dict[str, object]) -> None:
    standard = {"model", "prompt", "max_tokens", "temperature", "stream", "stream_options"}
    body = RequestStyle(kind).body(REQUEST)
    assert {name: value for name, value in body.items() if name not in standard} == extras


def test_a_server_that_cannot_ignore_eos_may_stop_early() -> None:
    assert answer(events(TOKEN, usage(2, 1)), style=RequestStyle(ServerKind.OPENAI)).failure is None
