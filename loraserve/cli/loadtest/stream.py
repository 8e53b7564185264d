"""Reads chunks of a streamed answer as bytes.

The generator shares the machine's cores with the server, so events are counted, not parsed. Only the last ones, which
have the usage or an error, are parsed.
"""

import re
from typing import Any

import msgspec

EMPTY_EVENTS = (b"data: [DONE]", b"data:[DONE]", b'"choices":[]')
"""Marks of events without output: the end of the stream, and the usage. Text inside an event cannot look like one,
because its quotes are escaped."""
EMPTY_DELTA = re.compile(
    rb'"delta":\{(?:(?:"\w+":(?:""|null|\[\]),)*"role":"assistant"(?:,"\w+":(?:""|null|\[\]))*|(?:"\w+":null,?)*)\}'
)
"""Matches the first and last event of a chat, also from servers that write all fields, in any order. An empty text
without a role may be a token whose bytes do not complete a character yet."""
TAIL_BYTES = 16_384


def has_token(chunk: bytes) -> bool:
    """Whether any event carries output. Counts, because one chunk may contain several events."""
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
    """One of the stream's last events; `error` as the server writes it."""

    usage: Usage | None = None
    error: Any = None


def last_events(tail: bytes) -> list[Ending]:
    """In order; skips events that are cut off or not JSON."""
    events = []
    for line in tail.splitlines():
        if line.startswith(b"data:") and (b'"usage"' in line or b'"error"' in line):
            try:
                events.append(msgspec.json.decode(line[5:], type=Ending))
            except msgspec.DecodeError:
                continue
    return events
