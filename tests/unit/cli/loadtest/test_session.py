import asyncio
import resource
from collections.abc import Iterator

import pytest
import rich_click as click
from aiohttp import web
from aiohttp.test_utils import TestServer

from loraserve.cli.bench import bench
from loraserve.cli.loadtest.report import Report
from loraserve.cli.loadtest.session import _session, run_session
from loraserve.cli.loadtest.settings import BenchSettings
from tests.support.loopback import stream

MODELS = {"data": [{"id": "base", "owned_by": "vllm"}]}
ANSWER = (
    b'data: {"choices":[{"text":"x"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":2}}\n\ndata: [DONE]\n\n'
)


def settings(url: str) -> BenchSettings:
    args = [url, "--num-requests", "3", "--prompt-tokens", "4", "--output-tokens", "2", "--seed", "0"]
    options = bench.make_context("bench", args).params
    del options["trace"]
    return BenchSettings(**options)


@pytest.fixture
def few_open_files() -> Iterator[int]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    yield 256
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_report_contains_no_password() -> None:
    async def list_models(_: web.Request) -> web.Response:
        return web.json_response(MODELS)

    async def complete(request: web.Request) -> web.StreamResponse:
        return await stream(request, [ANSWER])

    async def measure() -> Report:
        app = web.Application()
        app.router.add_get("/v1/models", list_models)
        app.router.add_post("/v1/completions", complete)
        async with TestServer(app) as server:
            url = str(server.make_url("/").with_user("me").with_password("secret"))
            _, found = await _session(settings(url))
            return found

    found = asyncio.run(measure())
    assert (found.total.num_requests, found.total.num_failed) == (3, 0)
    assert "secret" not in str(found.settings)
    assert str(found.settings["url"]).startswith("http://127.0.0.1:")


def test_the_limit_of_open_files_is_raised(few_open_files: int) -> None:
    with pytest.raises(click.ClickException, match="does not answer") as refused:
        run_session(settings("http://me:secret@127.0.0.1:1"))
    assert "secret" not in refused.value.message
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > few_open_files
