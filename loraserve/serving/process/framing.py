"""Messages on a byte stream: a 4-byte little-endian length, then msgpack. Both ends are ours: a bad frame is a bug."""

import struct
from collections.abc import Iterator

import msgspec

HEADER_BYTES = 4
MAX_FRAME_BYTES = 1 << 30
"""Far above any message (Ready includes a tokenizer of about 20 MB): only a lost frame boundary exceeds it."""

_length = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()


class FramingError(Exception):
    """The byte stream is not a sequence of frames."""


def encode_frame(message: object) -> bytearray:
    """Header and payload in one buffer, encoded in place."""
    buffer = bytearray(HEADER_BYTES)
    _encoder.encode_into(message, buffer, HEADER_BYTES)
    num_payload_bytes = len(buffer) - HEADER_BYTES
    if num_payload_bytes > MAX_FRAME_BYTES:
        raise FramingError(f"a message of {num_payload_bytes} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    _length.pack_into(buffer, 0, num_payload_bytes)
    return buffer


class FrameBuffer:
    """Splits received data, which arrives in pieces of any size, into payloads."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes) -> None:
        self._received += data

    def payloads(self) -> Iterator[bytes]:
        """Yield and remove every complete payload received so far; the rest stays for the next `feed`."""
        start = 0
        try:
            while (end := self._end_of_frame(start)) is not None:
                payload = bytes(memoryview(self._received)[start + HEADER_BYTES : end])
                start = end
                yield payload
        finally:
            del self._received[:start]

    def _end_of_frame(self, start: int) -> int | None:
        if len(self._received) < start + HEADER_BYTES:
            return None
        (num_payload_bytes,) = _length.unpack_from(self._received, start)
        if num_payload_bytes > MAX_FRAME_BYTES:
            raise FramingError(f"a frame announces {num_payload_bytes} bytes; the limit is {MAX_FRAME_BYTES}")
        end = start + HEADER_BYTES + num_payload_bytes
        return end if len(self._received) >= end else None
