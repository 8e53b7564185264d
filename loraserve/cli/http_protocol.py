"""uvicorn's HTTP protocol with an end to what a client may keep open: bytes of a head, time, connections."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from loraserve.cli.open_files import max_connections

MAX_UNFINISHED_BYTES = 64 * 1024
"""Above the limit that `FrontDoor` explains to clients: only what never ends gets here."""
HEAD_S = 60.0
"""From a connection's begin, or a head's, to the end of the head."""
SILENCE_S = 60.0
"""Between two pieces of a body, or until a client takes more of an answer. nginx gives as long for all three."""
HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedHttpProtocol(HttpToolsProtocol):
    """httptools collects a URL or a header until it is complete, however long it is, before any ASGI app is asked.

    uvicorn itself has a time limit only for connections between an answer and the next request.
    """

    _in_head = False
    _num_unfinished_bytes = 0
    _num_unsent_bytes = 0
    """When it was looked at last, while the client did not take what there is."""
    _waiting_since_s = 0.0
    """For the client; of the event loop's clock."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._waiting_since_s = self.loop.time()
        if len(self.connections) > max_connections():
            transport.abort()

    def data_received(self, data: bytes) -> None:
        was_in_head = self._in_head
        super().data_received(data)
        if not self._in_head:
            self._num_unfinished_bytes = 0
            self._waiting_since_s = self.loop.time()
        elif was_in_head:  # The piece in which a head begins may have held a long body before it: it is not counted.
            self._num_unfinished_bytes += len(data)
            if self._num_unfinished_bytes > MAX_UNFINISHED_BYTES:
                self._refuse(HEAD_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._waiting_since_s = self.loop.time()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

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
