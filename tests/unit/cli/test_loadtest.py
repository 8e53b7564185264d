import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest

from loraserve.cli.loadtest.client import RequestResult, RequestStyle, send
from loraserve.cli.loadtest.plan import Distribution, Lengths, PlannedRequest, Workload, plan, read_recorded, replay
from loraserve.cli.loadtest.report import percentiles_ms, report
from loraserve.cli.loadtest.runner import BenchRun, run

REQUEST = PlannedRequest("a", [11, 12], prompt_tokens=2, max_tokens=3, at_s=0.0)


def workload(**changes: object) -> Workload:
    fields: dict[str, object] = {
        "models": ["a", "b", "c"],
        "num_requests": 3000,
        "prompt_tokens": Lengths(20, 5),
        "output_tokens": Lengths(8),
    }
    return Workload(**{**fields, **changes})  # pyright: ignore[reportArgumentType]


def test_same_seed_same_plan() -> None:
    assert plan(workload(seed=1)) == plan(workload(seed=1)) != plan(workload(seed=2))


def test_lengths_fill_mean_plus_minus_spread() -> None:
    requests = plan(workload())
    assert {request.prompt_tokens for request in requests} == set(range(15, 26))
    assert {request.max_tokens for request in requests} == {8}
    assert all(len(request.prompt) == request.prompt_tokens for request in requests)


def test_round_robin_takes_turns() -> None:
    assert [request.model for request in plan(workload(num_requests=5))] == ["a", "b", "c", "a", "b"]


def test_zipf_asks_in_proportion_to_rank() -> None:
    requests = plan(workload(distribution=Distribution.ZIPF, zipf_s=1.0))
    counts = [sum(request.model == model for request in requests) for model in "abc"]
    # Shares 6/11, 3/11, 2/11 of 3000; the bounds are five standard deviations.
    assert counts == pytest.approx([1636, 818, 545], abs=140)


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_open_loop_keeps_the_rate_whatever_the_burstiness(burstiness: float) -> None:
    times_s = [request.at_s for request in plan(workload(request_rate=50.0, burstiness=burstiness))]
    assert times_s == sorted(times_s)
    assert 3000 / times_s[-1] == pytest.approx(50.0, rel=0.15)


def test_text_prompts_are_words() -> None:
    prompt = plan(workload(text_prompts=True, num_requests=1))[0]
    assert isinstance(prompt.prompt, str)
    assert len(prompt.prompt.split()) == prompt.prompt_tokens


def test_recorded_requests_are_sent_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text('{"model": "b", "prompt_token_ids": [11, 12], "num_output_tokens": 3}\n' * 2)
    requests = replay(read_recorded(file), workload(num_requests=9, request_rate=10.0))
    assert [(request.model, request.prompt, request.prompt_tokens, request.max_tokens) for request in requests] == [
        ("b", [11, 12], 2, 3)
    ] * 2
    assert requests[1].at_s > requests[0].at_s > 0


def test_a_recorded_request_with_an_unknown_field_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text('{"model": "b", "prompt_token_ids": [1], "num_output_tokens": 3, "temperature": 1}\n')
    with pytest.raises(msgspec.ValidationError, match="temperature"):
        read_recorded(file)


class Stream(httpx.AsyncByteStream):
    def __init__(self, chunks: list[bytes]) -> None:
        self._chunks = chunks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            yield chunk


def events(*payloads: object) -> list[bytes]:
    return [b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n" for payload in payloads]


def usage(prompt: int, completion: int) -> dict[str, object]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}


def answer(chunks: list[bytes], status: int = 200, style: RequestStyle | None = None) -> RequestResult:
    async def ask() -> RequestResult:
        transport = httpx.MockTransport(lambda _: httpx.Response(status, stream=Stream(chunks)))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await send(client, style or RequestStyle(), REQUEST)

    return asyncio.run(ask())


TOKEN = {"choices": [{"text": "x"}]}
DONE = [b"data: [DONE]\n\n"]


def test_stream_is_timed_and_its_usage_believed() -> None:
    result = answer(events(TOKEN, TOKEN, TOKEN, usage(2, 3)) + DONE)
    assert result.error is None
    assert (result.prompt_tokens, result.output_tokens) == (2, 3)
    assert len(result.gaps_s) == 2
    assert result.ttft_s is not None
    assert result.e2e_s is not None
    assert result.e2e_s >= result.ttft_s > 0


def test_chat_opening_and_end_are_no_tokens() -> None:
    opening = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    token, end = {"choices": [{"delta": {"content": "x"}}]}, {"choices": [{"delta": {}, "finish_reason": "length"}]}
    result = answer(events(opening, token, token, token, end, usage(9, 3)) + DONE, style=RequestStyle(chat=True))
    assert result.error is None
    assert len(result.gaps_s) == 2


def test_several_events_in_one_chunk_count_once_and_usage_is_found_in_pieces() -> None:
    whole = b"".join(events(TOKEN, TOKEN, TOKEN, usage(2, 3)) + DONE)
    result = answer([whole[:-40], whole[-40:]])
    assert result.error is None
    assert result.gaps_s == []


@pytest.mark.parametrize(
    ("chunks", "status", "message"),
    [
        (events(TOKEN, usage(2, 1)), 200, "1 tokens came, 3 were asked for"),
        (events(TOKEN, usage(5, 3)), 200, "5 prompt tokens were counted, 2 were sent"),
        (events(TOKEN), 200, "the stream ended without usage"),
        (events(TOKEN, {"error": {"message": "engine died"}}), 200, "engine died"),
        ([b'{"error":{"message":"no such model"}}'], 404, "HTTP 404: no such model"),
        ([b"<html>"], 502, "HTTP 502: <html>"),
    ],
)
def test_failures_are_results(chunks: list[bytes], status: int, message: str) -> None:
    assert answer(chunks, status).error == message


@pytest.mark.parametrize("concurrency", [1, 4, None])
def test_closed_loop_keeps_the_concurrency(concurrency: int | None) -> None:
    running, most = 0, 0

    async def handle(_: httpx.Request) -> httpx.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return httpx.Response(200, stream=Stream(events(TOKEN, usage(2, 3))))

    async def test() -> BenchRun:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://server") as client:
            return await run(client, RequestStyle(), [REQUEST] * 20, concurrency, lambda _: None)

    found = asyncio.run(test())
    assert len(found.results) == 20
    assert most == concurrency or concurrency is None


def test_percentiles_are_nearest_rank() -> None:
    found = percentiles_ms(i / 1000 for i in range(1, 101))
    assert found is not None
    assert (found.p50, found.p90, found.p99, found.max) == pytest.approx((50, 90, 99, 100))
    assert percentiles_ms([None]) is None


def test_report_counts_by_model_and_leaves_failures_out_of_times() -> None:
    good = RequestResult("a", 0.0, ttft_s=0.1, e2e_s=0.3, gaps_s=[0.1, 0.1], prompt_tokens=2, output_tokens=3)
    bad = RequestResult("b", 0.0, error="HTTP 500")
    found = report(BenchRun([good, good, bad], wall_s=2.0, client_cpu_s=0.1), {})
    assert found.total.output_tokens_per_s == pytest.approx(3.0)
    assert found.total.num_failed == 1
    assert found.by_model["b"].ttft_ms is None
    assert found.by_model["a"].tpot_ms is not None
    assert found.by_model["a"].tpot_ms.mean == pytest.approx(100)
    assert found.errors == {"HTTP 500": 1}
