import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import httpx
import pytest
import rich_click as click
from click.testing import CliRunner, Result

from loraserve.cli.async_http_client import async_http_client
from loraserve.cli.chat_session import ChatError, ChatOptions, ChatSession, connect
from loraserve.cli.main import main
from loraserve.cli.proxy import environment_proxy

SOCKS = "socks5://ann:hidden@127.0.0.1:1"
PAGE = {"data": [{"id": "base"}], "next_cursor": None}
Requests = list[tuple[str, str | None]]


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@contextmanager
def answering(status: int, body: bytes) -> Iterator[tuple[str, Requests]]:
    """The address of a server or proxy, and target and authorization of the requests it receives."""
    got: Requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            got.append((self.path, self.headers.get("authorization")))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.send_header("x-request-id", "r")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}", got
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def server() -> Iterator[tuple[str, Requests]]:
    with answering(200, json.dumps(PAGE).encode()) as found:
        yield found


@pytest.fixture
def proxy() -> Iterator[tuple[str, Requests]]:
    """Refuses everything."""
    with answering(403, b"") as found:
        yield found


def adapter_list(url: str) -> Result:
    return CliRunner().invoke(main, ["adapter", "list", "--json", "--url", url, "--api-key", "SECRET"])


def chat_models(url: str) -> list[str]:
    with connect(url, "SECRET") as client:
        return ChatSession(client, None, None, ChatOptions()).models()


def bench_status(url: str) -> int:
    async def ask() -> int:
        async with async_http_client(url, "SECRET") as client, client.get("v1/models") as response:
            return response.status

    return asyncio.run(ask())


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "ALL_PROXY"])
def test_requests_to_this_machine_bypass_the_proxy(
    variable: str, server: tuple[str, Requests], proxy: tuple[str, Requests], monkeypatch: pytest.MonkeyPatch
) -> None:
    (address, got), (proxy_address, proxy_got) = server, proxy
    monkeypatch.setenv(variable, f"http://{proxy_address}")
    result = adapter_list(f"http://{address}")
    assert result.exit_code == 0, result.output
    assert chat_models(f"http://{address}/v1") == ["base"]
    assert bench_status(f"http://{address}") == 200
    assert proxy_got == []
    assert len(got) >= 3
    assert {key for _, key in got} == {"Bearer SECRET"}


def test_a_socks_proxy_is_ignored_for_requests_to_this_machine(
    server: tuple[str, Requests], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", SOCKS)
    url = f"http://{server[0]}"
    assert adapter_list(url).exit_code == 0
    assert chat_models(url) == ["base"]
    assert bench_status(url) == 200


def test_requests_to_other_hosts_use_the_proxy_and_errors_name_it(
    proxy: tuple[str, Requests], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, got = proxy
    monkeypatch.setenv("http_proxy", f"http://ann:hidden@{address}")
    result = adapter_list("http://server.test:2")
    assert result.exit_code == 1
    words = " ".join(result.output.replace("│", " ").split())
    assert f"the server answered 403 Forbidden through the proxy http://{address}" in words
    assert "hidden" not in result.output
    with pytest.raises(ChatError, match=rf"\(HTTP 403 through the proxy http://{address}\)"):
        chat_models("http://server.test:2")
    assert bench_status("http://server.test:2") == 403
    assert [target.split("?")[0] for target, _ in got][1:] == ["http://server.test:2/v1/models"] * 2
    assert {key for _, key in got} == {"Bearer SECRET"}


def test_an_error_names_a_proxy_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "ann:hidden@127.0.0.1:1")
    with pytest.raises(ChatError, match=r"does not answer through the proxy http://127\.0\.0\.1:1 ") as refused:
        chat_models("http://server.test:2")
    assert "hidden" not in str(refused.value)
    assert "through the proxy" in adapter_list("http://server.test:2").output


@pytest.mark.parametrize("proxy_url", [SOCKS, "ftp://ann:hidden@127.0.0.1:1"])
def test_an_unsupported_kind_of_proxy_is_refused(proxy_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy_url)
    kind = proxy_url.partition(":")[0]
    message = f"ALL_PROXY names a {kind} proxy: use an http or https one, or list server.test in no_proxy"
    for ask in (chat_models, bench_status):
        with pytest.raises(click.ClickException) as refused:
            ask("http://server.test:2")
        assert refused.value.message == message
    result = adapter_list("http://server.test:2")
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert f"ALL_PROXY names a {kind} proxy" in result.output


def test_an_invalid_url_or_proxy_url_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(click.ClickException, match="http://server:port: "):
        connect("http://server:port", None)
    monkeypatch.setenv("http_proxy", "http://ann:hid/den@127.0.0.1:1")
    with pytest.raises(click.ClickException, match=r"^http_proxy is not a valid proxy URL$"):
        connect("http://server.test:2", None)


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST", "localhost.", "a.localhost", "127.8.9.1", "[::1]", "ann:x@127.0.0.1"],
)
def test_hosts_of_this_machine_use_no_proxy(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("all_proxy", "http://proxy")
    assert environment_proxy(f"http://{host}:8000/v1") is None


@pytest.mark.parametrize("host", ["server", "localhost.test", "notlocalhost", "128.0.0.1", "127.0.0.1.test", "[::2]"])
def test_other_hosts_use_the_proxy_of_their_scheme(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy")
    found = environment_proxy(f"https://{host}:8000")
    assert found is not None
    assert (found.url, found.named_by) == ("http://proxy", "https_proxy")
    assert environment_proxy(f"http://{host}:8000") is None


@pytest.mark.parametrize("host", ["server.test", "a.server.test", "[fd00::1]"])
def test_hosts_in_no_proxy_use_no_proxy(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy")
    monkeypatch.setenv("no_proxy", "other, .server.test,fd00::1")
    assert environment_proxy(f"http://{host}:8000") is None


def test_certificates_of_the_environment_are_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    create = httpx.create_ssl_context
    monkeypatch.setattr(httpx, "create_ssl_context", lambda: asked.append(True) or create())
    connect("https://127.0.0.1:2", None).close()
    assert asked == [True]
