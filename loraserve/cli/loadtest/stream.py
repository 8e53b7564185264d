"""What a chunk of a streamed answer says, read as bytes.

The generator shares the machine's cores with the server, so events are counted, not parsed; only those at the end, with
the usage or an error, are.
"""

import re
from typing import Any

import msgspec

EMPTY_EVENTS = (b"data: [DONE]", b"data:[DONE]", b'"choices":[]')
"""What marks an event without output: the end of the stream and the usage. A text in an event cannot look like one,
because quotes in it are escaped."""
EMPTY_DELTA = re.compile(
    rb'"delta":\{(?:(?:"\w+":(?:""|null|\[\]),)*"role":"assistant"(?:,"\w+":(?:""|null|\[\]))*|(?:"\w+":null,?)*)\}'
)
"""Likewise the opening and the end of a chat, also of servers that write all fields, in any order. An empty text
without a role may be a token: of bytes that are no character yet."""
TAIL_BYTES = 16_384


def has_token(chunk: bytes) -> bool:
    """Whether any event carries output. Counts, because one chunk may hold several events."""
    compact = chunk.replace(b'": ', b'":').replace(b', "', b',"')
    num_events = compact.startswith(b"data:") + compact.count(b"\ndata:")
    return num_events > sum(map(compact.count, EMPTY_EVENTS)) + len(EMPTY_DELTA.findall(compact))


class TokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int | None
    prompt_tokens_details: TokensDetails | None = None


class Ending(msgspec.Struct, frozen=True):
    """An event of the stream's last ones; `error` as the server writes it."""

    usage: Usage | None = None
    error: Any = None


def last_events(tail: bytes) -> list[Ending]:
    """In order; what is cut or no JSON is left out."""
    events = []
    for line in tail.splitlines():
        if line.startswith(b"data:") and (b'"usage"' in line or b'"error"' in line):
            try:
                events.append(msgspec.json.decode(line[5:], type=Ending))
            except msgspec.DecodeError:
                continue
    return events
