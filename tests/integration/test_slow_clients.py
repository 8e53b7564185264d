"""Clients that send or read nothing for too long, or send too much; real sockets, short limits."""

import asyncio
import contextlib
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from litestar.types import Receive, Scope, Send

from loraserve.cli.serve import http_protocol, http_server, open_files
from loraserve.cli.serve.http_server import HttpServer
from loraserve.cli.serve.start_error import StartError

LIMIT_S = 0.8
"""Several times as long as a busy machine keeps a client from sending or reading."""
POST = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n"
GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\n"
LARGE = 32 << 20


@pytest.fixture(autouse=True)
def _short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_S", LIMIT_S)
    monkeypatch.setattr(http_protocol, "SILENCE_S", LIMIT_S)
    monkeypatch.setattr(http_server, "TICKS_BETWEEN_CHECKS", 1)


class App:
    """Answers once it has the whole body."""

    def __init__(self, answer: bytes = b"done", wait_s: float = 0.0) -> None:
        self.answer, self.wait_s = answer, wait_s
        self.has_ended = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.has_ended.set()
                return
            more = message["more_body"]
        await asyncio.sleep(self.wait_s)
        headers = [(b"content-length", str(len(self.answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self.answer, "more_body": False})
        self.has_ended.set()


@contextlib.asynccontextmanager
async def serving(app: App) -> AsyncIterator[tuple[HttpServer, int]]:
    """The running server and its port."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as bound:
        http = HttpServer(app)
        running = asyncio.create_task(http.serve([bound]))
        await http.answers.wait()
        try:
            yield http, bound.getsockname()[1]
        finally:
            http.should_exit = True
            await running


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def against(app: Callable[[], App], client: Callable[[App, HttpServer, int], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        made = app()
        async with serving(made) as (http, port):
            # Less than a server's usual limits.
            await asyncio.wait_for(client(made, http, port), 30.0)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("sent", "expected"),
    [(b"", b""), (b"\r\n", b""), (b"GET / HT", TOO_SLOW), (POST + b"half a body", TOO_SLOW), (GET[:-2], TOO_SLOW)],
    ids=["nothing", "an empty line", "half a line", "half a body", "half a head"],
)
def test_a_client_that_stops_sending_is_disconnected(sent: bytes, expected: bytes) -> None:
    async def client(app: App, http: HttpServer, port: int) -> None:
        began_s = time.monotonic()
        async with connected(port) as (reader, writer):
            writer.write(sent)
            answer = await reader.read()
        assert time.monotonic() - began_s >= LIMIT_S
        assert answer.startswith(expected)
        assert bool(answer) == bool(expected)
        if sent.startswith(POST):
            await app.has_ended.wait()

    against(App, client)


def test_a_head_that_trickles_in_ends_the_connection() -> None:
    async def client(app: App, http: HttpServer, port: int) -> None:
        async with connected(port) as (reader, writer):
            ended = asyncio.create_task(reader.read())
            sent = 0
            while not ended.done():
                writer.write(GET[sent : sent + 1])
                sent += 1
                await asyncio.sleep(LIMIT_S / 8)
            assert sent < len(GET)
            # Bytes sent after the server closed reset the connection, and the client may see the reset first.
            with contextlib.suppress(ConnectionError):
                assert ended.result().startswith(TOO_SLOW)

    against(App, client)


def test_a_slow_body_is_accepted_while_its_bytes_keep_arriving() -> None:
    async def client(app: App, http: HttpServer, port: int) -> None:
        async with connected(port) as (reader, writer):
            writer.write(POST)
            for _ in range(10):
                await asyncio.sleep(LIMIT_S / 5)
                writer.write(b"x" * 10)
            assert (await reader.readuntil(b"done")).startswith(b"HTTP/1.1 200 ")
            # Between requests the keep-alive limit applies, which is longer.
            await asyncio.sleep(1.5 * LIMIT_S)
            writer.write(GET)
            assert (await reader.readuntil(b"done")).startswith(b"HTTP/1.1 200 ")

    against(App, client)


def test_a_client_waiting_for_a_slow_answer_is_not_disconnected() -> None:
    async def client(app: App, http: HttpServer, port: int) -> None:
        async with connected(port) as (reader, writer):
            writer.write(GET)
            assert (await reader.readuntil(b"done")).startswith(b"HTTP/1.1 200 ")

    against(lambda: App(wait_s=2 * LIMIT_S), client)


def test_a_client_that_does_not_read_its_answer_is_disconnected() -> None:
    async def client(app: App, http: HttpServer, port: int) -> None:
        async with connected(port) as (_, writer):
            writer.write(GET)
            await asyncio.sleep(LIMIT_S / 2)
            assert len(http.server_state.connections) == 1
            while http.server_state.connections:
                await asyncio.sleep(0.02)
            await app.has_ended.wait()

    against(lambda: App(b"x" * LARGE), client)


def test_a_slow_reader_receives_the_whole_answer() -> None:
    async def client(app: App, http: HttpServer, port: int) -> None:
        began_s = time.monotonic()
        async with connected(port) as (reader, writer):
            writer.write(GET)
            await reader.readuntil(b"\r\n\r\n")
            for _ in range(16):
                await reader.readexactly(LARGE // 16)
                await asyncio.sleep(LIMIT_S / 8)
        assert time.monotonic() - began_s > 2 * LIMIT_S

    against(lambda: App(b"x" * LARGE), client)


def test_connections_above_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "max_connections", lambda: 3)
    monkeypatch.setattr(http_protocol, "HEAD_S", 60.0)

    async def client(app: App, http: HttpServer, port: int) -> None:
        async with contextlib.AsyncExitStack() as held:
            connections = [await held.enter_async_context(connected(port)) for _ in range(3)]
            async with connected(port) as (refused, _):
                with contextlib.suppress(ConnectionError):
                    assert await refused.read() == b""
            reader, writer = connections[0]
            writer.write(GET)
            assert (await reader.readuntil(b"done")).startswith(b"HTTP/1.1 200 ")

    against(App, client)


def test_the_open_file_limit_is_raised_and_some_files_are_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [256, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: limits.__setitem__(slice(None), wanted))
    assert open_files.max_connections() == 128
    open_files.raise_limit()
    assert limits == [4096, 4096]
    assert open_files.max_connections() == 4096 - open_files.RESERVED


@pytest.mark.parametrize("limits", [(64, 64), (64, 255)])
def test_the_server_does_not_start_with_too_few_open_files(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int]
) -> None:
    current = [*limits]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(current))
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: current.__setitem__(slice(None), wanted))
    with pytest.raises(StartError, match=rf"^only {limits[1]} files .* at least 256 "):
        open_files.raise_limit()


def test_the_open_file_limit_is_raised_as_far_as_macos_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [256, resource.RLIM_INFINITY]

    def setrlimit(_: int, wanted: tuple[int, int]) -> None:
        if wanted[0] > 10_240:
            raise ValueError("current limit exceeds maximum limit")
        limits[:] = wanted

    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    open_files.raise_limit()
    assert limits == [10_240, resource.RLIM_INFINITY]
    open_files.raise_limit()
    assert limits == [10_240, resource.RLIM_INFINITY]


CHUNKED = b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n"


@pytest.mark.parametrize("piece", [b"x" * 1024, b"x: y\r\n" * 200], ids=["one", "many"])
def test_endless_trailers_end_the_connection(piece: bytes) -> None:
    async def client(app: App, http: HttpServer, port: int) -> None:
        async with connected(port) as (reader, writer):
            writer.write(CHUNKED + b"x: ")
            ended = asyncio.create_task(reader.read())
            num_bytes = 0
            while not ended.done():
                writer.write(piece)
                num_bytes += len(piece)
                await asyncio.sleep(0.001)
            assert num_bytes < 8 * http_protocol.MAX_UNFINISHED_BYTES
            with contextlib.suppress(ConnectionError):
                assert ended.result().startswith(b"HTTP/1.1 431 ")
            await app.has_ended.wait()

    against(App, client)


def test_trailers_do_not_become_headers() -> None:
    seen: list[bytes] = []

    class Looking(App):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await super().__call__(scope, receive, send)
            if scope["type"] == "http":
                seen.extend(name for name, _ in scope["headers"])

    async def client(app: App, http: HttpServer, port: int) -> None:
        async with connected(port) as (reader, writer):
            writer.write(CHUNKED + b"x-tenant: acme\r\n\r\n")
            assert (await reader.readuntil(b"done")).startswith(b"HTTP/1.1 200 ")
        assert seen == [b"host", b"transfer-encoding"]

    against(Looking, client)


def test_pipelined_requests_above_the_limit_end_the_connection() -> None:
    async def client(app: App, http: HttpServer, port: int) -> None:
        num_sent = 1 + http_protocol.MAX_PIPELINED
        async with connected(port) as (reader, writer):
            writer.write(GET * num_sent)
            for _ in range(num_sent):
                assert (await reader.readuntil(b"done")).startswith(b"HTTP/1.1 200 ")
        async with connected(port) as (reader, writer):
            writer.write(GET * (num_sent + 1))
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        await app.has_ended.wait()

    against(lambda: App(wait_s=LIMIT_S / 8), client)


def test_a_disconnect_is_noticed_with_a_pipelined_request_pending() -> None:
    class Waiting(App):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                while (await receive())["type"] != "http.disconnect":
                    pass
                self.has_ended.set()

    async def client(app: App, http: HttpServer, port: int) -> None:
        async with connected(port) as (_, writer):
            writer.write(GET + GET)
            await asyncio.sleep(LIMIT_S / 8)
        await app.has_ended.wait()

    against(Waiting, client)
