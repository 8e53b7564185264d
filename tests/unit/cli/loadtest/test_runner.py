import asyncio
import signal

import pytest
import rich_click as click
from aiohttp import web
from aiohttp.test_utils import TestServer

from loraserve.cli.loadtest import runner
from loraserve.cli.loadtest.client import RequestStyle
from loraserve.cli.loadtest.plan import PlannedRequest
from loraserve.cli.loadtest.runner import BenchRun, http_client, run
from tests.support.loopback import client_of, stream

REQUEST = PlannedRequest("a", [11, 12], prompt_tokens=2, max_tokens=3, at_s=0.0)
ANSWER = (
    b'data: {"choices":[{"text":"x"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":3}}\n\ndata: [DONE]\n\n'
)


@pytest.mark.parametrize("concurrency", [1, 4, None])
def test_closed_loop_keeps_the_concurrency(concurrency: int | None) -> None:
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
def test_an_interrupted_loop_keeps_what_has_ended(concurrency: int | None) -> None:
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


def test_connections_have_no_limit() -> None:
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


def asked_for(url_path: str, path: str, api_key: str | None = None) -> tuple[str, str | None]:
    """Path and authorization that a server got."""

    async def echo(request: web.Request) -> web.Response:
        return web.json_response([request.path, request.headers.get("authorization")])

    async def ask() -> tuple[str, str | None]:
        async with client_of(echo, url_path, api_key) as client, client.get(path) as response:
            return tuple(await response.json())

    return asyncio.run(ask())


@pytest.mark.parametrize("prefix", ["", "/proxied"])
@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_the_url_may_have_a_path_and_end_in_v1(prefix: str, ending: str) -> None:
    assert asked_for(f"{prefix}{ending}", "v1/models") == (f"{prefix}/v1/models", None)


def test_the_key_is_a_bearer_token() -> None:
    assert asked_for("/", "info", "secret") == ("/info", "Bearer secret")


def test_a_user_in_the_url_takes_the_keys_place() -> None:
    async def headers() -> str:
        async def echo(request: web.Request) -> web.Response:
            return web.Response(text=request.headers["authorization"])

        app = web.Application()
        app.router.add_get("/info", echo)
        async with TestServer(app) as server:
            url = server.make_url("/").with_user("ann").with_password("secret")
            async with http_client(str(url), "key") as client, client.get("info") as response:
                return await response.text()

    assert asyncio.run(headers()) == "Basic YW5uOnNlY3JldA=="


@pytest.mark.parametrize("url", ["server:1", "server", "http://server:port", "http://[", ""])
def test_what_is_no_url_is_refused(url: str) -> None:
    async def connect() -> None:
        async with http_client(url, None):
            pass

    with pytest.raises(click.ClickException):
        asyncio.run(connect())


@pytest.mark.parametrize(("no_proxy", "is_asked"), [("", True), ("other,server.test", False)])
@pytest.mark.parametrize("variable", ["http_proxy", "all_proxy"])
def test_the_environments_proxy_is_asked(
    variable: str, no_proxy: str, is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name.upper(), raising=False)
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "127.0.0.1:1")
    monkeypatch.setenv("no_proxy", no_proxy)

    async def failure() -> str:
        async with http_client("http://server.test:2", None) as client:
            result = await run(client, RequestStyle(), [REQUEST], 1, lambda _: None)
        assert result.results[0].failure is not None
        return result.results[0].failure.message

    assert ("ClientProxyConnectionError" in asyncio.run(failure())) == is_asked


def test_a_proxy_of_another_kind_is_refused_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name.upper(), raising=False)
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("all_proxy", "socks5://ann:secret@127.0.0.1:1")

    async def connect() -> None:
        async with http_client("http://server:2", None):
            pass

    with pytest.raises(click.ClickException, match=r"names a socks5 proxy: .* or list server in no_proxy") as refused:
        asyncio.run(connect())
    assert "secret" not in refused.value.message


def test_an_open_loop_times_a_late_request_from_when_it_was_due(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_idle_connection_is_given_up_before_servers_do() -> None:
    uvicorn_s = 5  # its default, which vLLM and SGLang keep
    assert uvicorn_s / 2 >= runner.KEEPALIVE_S
