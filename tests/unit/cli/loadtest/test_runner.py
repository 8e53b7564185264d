import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from loraserve.cli.loadtest.client import RequestStyle
from loraserve.cli.loadtest.plan import PlannedRequest
from loraserve.cli.loadtest.runner import BenchRun, http_client, run

REQUEST = PlannedRequest("a", [11, 12], prompt_tokens=2, max_tokens=3, at_s=0.0)
ANSWER = (
    b'data: {"choices":[{"text":"x"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":3}}\n\ndata: [DONE]\n\n'
)


class Stream(httpx.AsyncByteStream):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield ANSWER


@pytest.mark.parametrize("concurrency", [1, 4, None])
def test_closed_loop_keeps_the_concurrency(concurrency: int | None) -> None:
    running, most = 0, 0

    async def handle(_: httpx.Request) -> httpx.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return httpx.Response(200, stream=Stream())

    async def test() -> BenchRun:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://server") as client:
            return await run(client, RequestStyle(), [REQUEST] * 20, concurrency, lambda _: None)

    found = asyncio.run(test())
    assert [result.failure for result in found.results] == [None] * 20
    assert most == concurrency or concurrency is None


@pytest.mark.parametrize("url", ["http://server:1", "http://server:1/", "http://server:1/v1", "http://server:1/v1/"])
def test_the_url_may_end_in_v1(url: str) -> None:
    assert str(http_client(url, None).base_url) == "http://server:1"
