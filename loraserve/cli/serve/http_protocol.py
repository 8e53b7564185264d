"""uvicorn's HTTP protocol with an end to what a client may keep open: bytes of a head, requests, time, connections.

And without chunks for HTTP/1.0, which has none.
"""

import asyncio

from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from loraserve.cli.serve.open_files import max_connections

MAX_UNFINISHED_BYTES = 64 * 1024
"""Above the limit that `FrontDoor` explains to clients: only what never ends gets here."""
MAX_PIPELINED = 8
"""Requests of a connection that wait for the answer to an earlier one."""
HEAD_S = 60.0
"""From a connection's begin, or a head's, to the end of the head."""
SILENCE_S = 60.0
"""Between two pieces of a body, or until a client takes more of an answer. nginx gives as long for all three."""
HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedHttpProtocol(HttpToolsProtocol):
    """httptools collects a URL or a header until it is complete, however long it is, before any ASGI app is asked.

    uvicorn itself has a time limit only for connections between an answer and the next request. It queues as many
    requests as a client sends, and tells only the last of them that the client has gone.
    """

    _in_head = False
    _has_advanced = False
    """Whether the last piece held more than a part of a head, or of what trails a body."""
    _num_unfinished_bytes = 0
    _answered_cycle: RequestResponseCycle | None = None
    """`cycle` is that of the request that came last."""
    _num_unsent_bytes = 0
    """When it was looked at last, while the client did not take what there is."""
    _waiting_since_s = 0.0
    """For the client; of the event loop's clock."""

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
        if self._in_head:  # What trails a body is no header: nobody has looked at it, nor at how much of it there is.
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._has_advanced = True
        if len(self.pipeline) >= MAX_PIPELINED:
            self.transport.abort()
            return
        super().on_headers_complete()
        if self.pipeline:
            # Who does not read does not see that the client has gone.
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
        """Call now and then."""
        silent_s = self.loop.time() - self._waiting_since_s
        if self.flow.write_paused or self.transport.is_closing():
            num_unsent_bytes, before = self.transport.get_write_buffer_size(), self._num_unsent_bytes
            self._num_unsent_bytes = num_unsent_bytes
            if num_unsent_bytes < before:
                self._waiting_since_s = self.loop.time()
            elif silent_s > SILENCE_S:
                # What it does not take would keep the connection open.
                self.transport.abort()
        elif self.flow.read_paused:
            # It would send more: the time in which it may not is not its own.
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
    """uvicorn sends them all the same: here an answer of unknown length ends with its connection."""

    async def unchunked(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        has_length = False

        async def send_plainly(message: ASGISendEvent) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                if not has_length:
                    cycle.chunked_encoding = False
            elif message["type"] == "http.response.body" and not has_length:
                # What uvicorn counts down to the end.
                cycle.expected_content_length += len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plainly)

    return unchunked
