"""Answers to HTTP/1.0 clients, such as proxies, over a real socket."""

from typing import Any

import pytest
from litestar.types import Receive, Scope, Send

from loraserve.cli.serve.http_server import HttpServer
from tests.integration.test_slow_clients import App, against, connected

PIECES = [b"data: one\n\n", b"", b"data: two\n\n"]


class Streaming(App):
    """An answer whose length is not known before its end."""

    headers: tuple[tuple[bytes, bytes], ...] = ((b"content-type", b"text/event-stream"),)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        await send({"type": "http.response.start", "status": 200, "headers": [*self.headers]})
        for piece in PIECES:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def answer(port: int, line: str) -> tuple[list[bytes], bytes]:
    """Head and body; the connection closes after them."""
    async with connected(port) as (reader, writer):
        writer.write(f"{line}\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    return head.lower().split(b"\r\n"), body


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_an_http_1_0_client_gets_a_stream_without_chunks(method: str) -> None:
    async def client(_app: Any, _http: HttpServer, port: int) -> None:
        head, body = await answer(port, f"{method} / HTTP/1.0")
        assert b"connection: close" in head
        assert not [line for line in head if line.startswith((b"transfer-encoding", b"content-length"))]
        assert body == (b"".join(PIECES) if method == "GET" else b"")

    against(Streaming, client)


def test_an_answer_of_known_length_has_a_content_length(caplog: pytest.LogCaptureFixture) -> None:
    async def client(_app: Any, _http: HttpServer, port: int) -> None:
        head, body = await answer(port, "GET / HTTP/1.0")
        assert (b"content-length: 4" in head, body) == (True, b"done")

    against(App, client)
    assert caplog.text == ""


def test_an_http_1_1_client_gets_chunks() -> None:
    async def client(_app: Any, _http: HttpServer, port: int) -> None:
        head, body = await answer(port, "GET / HTTP/1.1")
        assert b"transfer-encoding: chunked" in head
        assert body == b"b\r\ndata: one\n\n\r\nb\r\ndata: two\n\n\r\n0\r\n\r\n"

    against(Streaming, client)
