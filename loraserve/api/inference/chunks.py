"""Stream chunks as bytes. The parts that all chunks of a response share are encoded once."""

import msgspec

from loraserve.api.schemas.usage import Usage

END = b"}\n\n"


class ChunkHead(msgspec.Struct, frozen=True):
    """The fields before `choices`."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class ChunkEncoder:
    """usage_field: whether chunks have a `usage` that is null unless given, as OpenAI's have with include_usage."""

    def __init__(self, head: ChunkHead, usage_field: bool) -> None:
        self._encoder = msgspec.json.Encoder()
        self._head = b"data: " + self._encoder.encode(head)[:-1] + b',"choices":['
        self._tail = (b'],"usage":null' if usage_field else b"]") + END

    def chunk(self, choice: msgspec.Struct | None, usage: Usage | None = None, **fields: object) -> bytes:
        """choice: None = an empty `choices` list. fields: appended after all others."""
        choices = b"" if choice is None else self._encoder.encode(choice)
        tail = self._tail if usage is None else b'],"usage":' + self._encoder.encode(usage) + END
        if fields:
            tail = tail.removesuffix(END) + b"," + self._encoder.encode(fields)[1:-1] + END
        return self._head + choices + tail
