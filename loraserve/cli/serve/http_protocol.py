"""uvicorn's HTTP protocol with limits on what a client may use: bytes of a head, pipelined requests, time, connections.

Also sends no chunks to HTTP/1.0 clients, which do not know them.
"""

import asyncio

from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from loraserve.cli.serve.open_files import max_connections

MAX_UNFINISHED_BYTES = 64 * 1024
"""Above the limit of `FrontDoor`, which explains itself to clients: only endless heads reach this one."""
MAX_PIPELINED = 8
"""Requests of a connection that wait for the response to an earlier one."""
HEAD_S = 60.0
"""From the start of a connection, or of a request head, to the end of the head."""
SILENCE_S = 60.0
"""Between two pieces of a body, or until a client takes more of a response. All three limits are the same in nginx."""
HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedHttpProtocol(HttpToolsProtocol):
    """httptools collects a URL or a header of any length until it is complete, before it reaches an ASGI app.

    uvicorn's only time limit is for connections between a response and the next request. It queues as many requests as
    a client sends, and reports a disconnect only to the last of them.
    """

    _in_head = False
    _has_advanced = False
    """Whether the last data received held more than a part of a head or of trailers."""
    _num_unfinished_bytes = 0
    _answered_cycle: RequestResponseCycle | None = None
    """The request being answered; `cycle` is the one that arrived last."""
    _num_unsent_bytes = 0
    """At the last check while the client was not taking data."""
    _waiting_since_s = 0.0
    """Start of the wait for the client, on the event loop's clock."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._waiting_since_s = self.loop.time()
        if len(self.connections) > max_connections():
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        cycle = self._answered_cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        self._has_advanced = False
        super().data_received(data)
        if not self._in_head:
            self._waiting_since_s = self.loop.time()
        if self._has_advanced:
            self._num_unfinished_bytes = 0
        else:
            self._num_unfinished_bytes += len(data)
            if self._num_unfinished_bytes > MAX_UNFINISHED_BYTES:
                self._refuse(HEAD_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = self._has_advanced = True
        self._waiting_since_s = self.loop.time()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # Not for trailers: neither their content nor their size has been checked.
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._has_advanced = True
        if len(self.pipeline) >= MAX_PIPELINED:
            self.transport.abort()
            return
        super().on_headers_complete()
        if self.pipeline:
            # uvicorn has paused reading, but a client's disconnect is noticed only while reading.
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._has_advanced = True
        super().on_body(body)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered_cycle = cycle
        super()._start_asgi_task(cycle, _without_chunks(app, cycle) if cycle.scope["http_version"] == "1.0" else app)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._waiting_since_s = self.loop.time()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._waiting_since_s = self.loop.time()

    def close_if_too_slow(self) -> None:
        """Call periodically."""
        silent_s = self.loop.time() - self._waiting_since_s
        if self.flow.write_paused or self.transport.is_closing():
            num_unsent_bytes, before = self.transport.get_write_buffer_size(), self._num_unsent_bytes
            self._num_unsent_bytes = num_unsent_bytes
            if num_unsent_bytes < before:
                self._waiting_since_s = self.loop.time()
            elif silent_s > SILENCE_S:
                # close() would wait until the client takes the rest.
                self.transport.abort()
        elif self.flow.read_paused:
            # We are not reading, so this time does not count against the client.
            self._waiting_since_s = self.loop.time()
        elif self._is_answering:
            if self.cycle.more_body and silent_s > SILENCE_S:
                self._refuse(TOO_SLOW)
        elif self.timeout_keep_alive_task is None and silent_s > HEAD_S:
            if self._in_head:
                self._refuse(TOO_SLOW)
            else:
                self.transport.close()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, answer: bytes) -> None:
        has_begun = self._is_answering and (self.cycle.response_started or not self.cycle.more_body)
        if not has_begun and not self.transport.is_closing():
            self.transport.write(answer)
        self.transport.close()


def _without_chunks(app: ASGI3Application, cycle: RequestResponseCycle) -> ASGI3Application:
    """uvicorn sends chunks to HTTP/1.0 too: here the end of the connection ends a response of unknown length."""

    async def unchunked(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        has_length = False

        async def send_plainly(message: ASGISendEvent) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                if not has_length:
                    cycle.chunked_encoding = False
            elif message["type"] == "http.response.body" and not has_length:
                # uvicorn subtracts the bytes it sends, and expects 0 at the end.
                cycle.expected_content_length += len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plainly)

    return unchunked
