import asyncio

import aiohttp
import pytest
import rich_click as click
from aiohttp import web
from aiohttp.test_utils import TestServer

from loraserve.cli.async_http_client import KEEPALIVE_S, async_http_client
from tests.support.loopback import client_of


def asked_for(url_path: str, path: str, api_key: str | None = None) -> tuple[str, str | None]:
    """Path and authorization that the server received."""

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


def test_a_user_in_the_url_replaces_the_key() -> None:
    async def headers() -> str:
        async def echo(request: web.Request) -> web.Response:
            return web.Response(text=request.headers["authorization"])

        app = web.Application()
        app.router.add_get("/info", echo)
        async with TestServer(app) as server:
            url = server.make_url("/").with_user("ann").with_password("secret")
            async with async_http_client(str(url), "key") as client, client.get("info") as response:
                return await response.text()

    assert asyncio.run(headers()) == "Basic YW5uOnNlY3JldA=="


@pytest.mark.parametrize("url", ["server:1", "server", "http://server:port", "http://[", ""])
def test_an_invalid_url_is_refused(url: str) -> None:
    async def connect() -> None:
        async with async_http_client(url, None):
            pass

    with pytest.raises(click.ClickException):
        asyncio.run(connect())


@pytest.mark.parametrize("value", ["hidden\n", "hid\r\nden", "hidd\0en", "hiddén"])
@pytest.mark.parametrize("name", ["authorization", "x-tenant"])
def test_an_invalid_header_value_is_refused_without_quoting_it(name: str, value: str) -> None:
    async def connect() -> None:
        key, headers = (value, {}) if name == "authorization" else (None, {name: value})
        async with async_http_client("http://server:2", key, headers):
            pass

    with pytest.raises(click.ClickException, match=f"the value of {name} has a line break") as refused:
        asyncio.run(connect())
    assert "hid" not in refused.value.message


@pytest.mark.parametrize(("no_proxy", "is_asked"), [("", True), ("other,server.test", False)])
@pytest.mark.parametrize("variable", ["http_proxy", "all_proxy"])
def test_the_proxy_of_the_environment_is_used(
    variable: str, no_proxy: str, is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name.upper(), raising=False)
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "127.0.0.1:1")
    monkeypatch.setenv("no_proxy", no_proxy)

    async def failure() -> str:
        async with async_http_client("http://server.test:2", None) as client:
            with pytest.raises(aiohttp.ClientError) as failed:
                await client.get("v1/models")
        return type(failed.value).__name__

    assert ("ClientProxyConnectionError" in asyncio.run(failure())) == is_asked


def test_a_socks_proxy_is_refused_without_quoting_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name.upper(), raising=False)
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("all_proxy", "socks5://ann:secret@127.0.0.1:1")

    async def connect() -> None:
        async with async_http_client("http://server:2", None):
            pass

    with pytest.raises(click.ClickException, match=r"names a socks5 proxy: .* or list server in no_proxy") as refused:
        asyncio.run(connect())
    assert "secret" not in refused.value.message


def test_idle_connections_are_closed_before_servers_close_them() -> None:
    uvicorn_s = 5  # its default, which vLLM and SGLang keep
    assert uvicorn_s / 2 >= KEEPALIVE_S
