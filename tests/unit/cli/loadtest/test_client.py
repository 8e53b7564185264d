import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from loraserve.cli.loadtest.client import RequestResult, RequestStyle, send
from loraserve.cli.loadtest.plan import PlannedRequest
from loraserve.cli.loadtest.server_kind import ServerKind

REQUEST = PlannedRequest("a", [11, 12], prompt_tokens=2, max_tokens=3, at_s=0.0)
TOKEN = {"choices": [{"text": "x"}]}
DONE = [b"data: [DONE]\n\n"]


class Stream(httpx.AsyncByteStream):
    def __init__(self, chunks: list[bytes]) -> None:
        self._chunks = chunks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            yield chunk


def events(*payloads: object) -> list[bytes]:
    return [b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n" for payload in payloads]


def usage(prompt: int, completion: int, **more: object) -> dict[str, object]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion, **more}}


def answer(chunks: list[bytes], status: int = 200, style: RequestStyle | None = None) -> RequestResult:
    async def ask() -> RequestResult:
        transport = httpx.MockTransport(lambda _: httpx.Response(status, stream=Stream(chunks)))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await send(client, style or RequestStyle(), REQUEST)

    return asyncio.run(ask())


def test_stream_is_timed_and_its_usage_believed() -> None:
    result = answer(events(TOKEN, TOKEN, TOKEN, usage(2, 3)) + DONE)
    assert result.failure is None
    assert (result.prompt_tokens, result.output_tokens, result.cached_tokens) == (2, 3, None)
    assert len(result.gaps_s) == 2
    assert result.ttft_s is not None
    assert result.e2e_s is not None
    assert result.e2e_s >= result.ttft_s > 0


def test_cached_tokens_are_read_where_the_server_says_them() -> None:
    details = {"prompt_tokens_details": {"cached_tokens": 1}}
    assert answer(events(TOKEN, usage(2, 3, **details))).cached_tokens == 1


def test_several_events_in_one_chunk_count_once_and_usage_is_found_in_pieces() -> None:
    whole = b"".join(events(TOKEN, TOKEN, TOKEN, usage(2, 3)) + DONE)
    result = answer([whole[:-40], whole[-40:]])
    assert result.failure is None
    assert result.gaps_s == []


def test_usage_in_every_chunk_counts_as_the_last_says() -> None:
    # LoRAX: zeros until the end, and an output in the chunk with the true counts.
    chunks = [{"choices": [{"text": "x"}], "usage": {"prompt_tokens": 0, "completion_tokens": 0}}] * 2
    last = {"choices": [{"text": "x"}], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}
    result = answer(events(*chunks, last))
    assert (result.failure, result.output_tokens, len(result.gaps_s)) == (None, 3, 2)


@pytest.mark.parametrize(
    ("chunks", "status", "code", "message"),
    [
        (events(TOKEN, usage(2, 1)), 200, "tokens", "1 tokens came, 3 were asked for"),
        (events(TOKEN, usage(5, 3)), 200, "tokens", "5 prompt tokens were counted, 2 were sent"),
        (events(TOKEN), 200, "no usage", "the stream ended without usage"),
        (events(TOKEN, {"error": {"message": "died", "code": "engine_dead"}}), 200, "stream engine_dead", "died"),
        ([b'{"error":{"message":"no such model"}}'], 404, "HTTP 404", "no such model"),
    ],
)
def test_failures_are_results(chunks: list[bytes], status: int, code: str, message: str) -> None:
    failure = answer(chunks, status).failure
    assert failure is not None
    assert (failure.code, failure.message) == (code, message)


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
