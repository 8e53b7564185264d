"""uvicorn's HTTP protocol with an end to how much of a request's head is buffered."""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_UNFINISHED_BYTES = 64 * 1024
"""Above the limit that `FrontDoor` explains to clients: only what never ends gets here."""
ANSWER = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedHttpProtocol(HttpToolsProtocol):
    """httptools collects a URL or a header until it is complete, however long it is, before any ASGI app is asked."""

    _in_head = False
    _num_unfinished_bytes = 0

    def data_received(self, data: bytes) -> None:
        was_in_head = self._in_head
        super().data_received(data)
        if not self._in_head:
            self._num_unfinished_bytes = 0
        elif was_in_head:  # The piece in which a head begins may have held a long body before it: it is not counted.
            self._num_unfinished_bytes += len(data)
            if self._num_unfinished_bytes > MAX_UNFINISHED_BYTES:
                self._refuse()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def _refuse(self) -> None:
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if not is_answering and not self.transport.is_closing():
            self.transport.write(ANSWER)
        self.transport.close()
