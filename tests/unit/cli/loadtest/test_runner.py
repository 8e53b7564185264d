import asyncio
import signal

import pytest
from aiohttp import web

from loraserve.cli.loadtest import runner
from loraserve.cli.loadtest.client import RequestStyle
from loraserve.cli.loadtest.plan import PlannedRequest
from loraserve.cli.loadtest.runner import BenchRun, run
from tests.support.loopback import client_of, stream

REQUEST = PlannedRequest("a", [11, 12], prompt_tokens=2, max_tokens=3, at_s=0.0)
ANSWER = (
    b'data: {"choices":[{"text":"x"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":3}}\n\ndata: [DONE]\n\n'
)


@pytest.mark.parametrize("concurrency", [1, 4, None])
def test_a_closed_loop_keeps_the_given_concurrency(concurrency: int | None) -> None:
    running, most = 0, 0
    connections: set[object] = set()

    async def handle(request: web.Request) -> web.StreamResponse:
        nonlocal running, most
        connections.add(request.transport)
        running += 1
        most = max(most, running)
        while concurrency and most < concurrency:
            await asyncio.sleep(0)
        running -= 1
        return await stream(request, [ANSWER])

    async def test() -> BenchRun:
        async with client_of(handle) as client:
            return await run(client, RequestStyle(), [REQUEST] * 20, concurrency, lambda _: None)

    found = asyncio.run(test())
    assert [result.failure for result in found.results] == [None] * 20
    assert concurrency is None or most == len(connections) == concurrency


@pytest.mark.parametrize("concurrency", [2, None])
def test_an_interrupted_loop_keeps_finished_results(concurrency: int | None) -> None:
    is_first = True

    async def handle(request: web.Request) -> web.StreamResponse:
        nonlocal is_first
        if not is_first:
            await asyncio.Event().wait()
        is_first = False
        return await stream(request, [ANSWER])

    async def test() -> BenchRun:
        async with client_of(handle) as client:
            return await run(
                client, RequestStyle(), [REQUEST] * 5, concurrency, lambda _: signal.raise_signal(signal.SIGINT)
            )

    found = asyncio.run(test())
    assert [result.failure for result in found.results] == [None]
    assert found.interrupted_by is signal.SIGINT


def test_the_number_of_connections_is_not_limited() -> None:
    running = 0

    async def handle(request: web.Request) -> web.StreamResponse:
        nonlocal running
        running += 1
        while running < 150:
            await asyncio.sleep(0.01)
        return await stream(request, [ANSWER])

    async def test() -> BenchRun:
        async with client_of(handle) as client:
            return await run(client, RequestStyle(), [REQUEST] * 150, 150, lambda _: None)

    assert [result.failure for result in asyncio.run(test()).results] == [None] * 150


def test_an_open_loop_times_a_late_request_from_its_due_time(monkeypatch: pytest.MonkeyPatch) -> None:
    late_s = 0.3
    sleep = asyncio.sleep

    async def oversleep(seconds: float) -> None:
        await sleep(seconds + late_s)

    async def test() -> BenchRun:
        async with client_of(lambda request: stream(request, [ANSWER])) as client:
            monkeypatch.setattr(runner.asyncio, "sleep", oversleep)
            return await run(client, RequestStyle(), [REQUEST], None, lambda _: None)

    (result,) = asyncio.run(test()).results
    assert result.late_s >= late_s
    assert result.ttft_s is not None
    assert result.e2e_s is not None
    assert result.e2e_s >= result.ttft_s > result.late_s
