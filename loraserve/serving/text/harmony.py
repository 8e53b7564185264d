"""Reads an answer in OpenAI's harmony format, gpt-oss's: messages that name a channel and maybe a recipient."""

import re
from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum, auto

from loraserve.serving.text.stop_strings import overlap

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CALL = "<|call|>"
FINAL = "final"
"""The channel of what is said to the person who asked."""
CALL_OPENING = f"{CHANNEL}commentary to="
"""Before the recipient of a message that has one, however the model wrote it."""
_ANALYSIS = "analysis"
_RECIPIENT = "to="
_ENDS = ("<|end|>", CALL, "<|return|>", START)
"""Of a message; the last begins the next one."""
_MAX_HEADER = 256
"""Characters."""
_CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT_NAME = re.compile(_RECIPIENT + r"([^\s<]+)")


@dataclass(frozen=True, slots=True)
class HarmonyStart:
    is_in_message: bool
    """Whether the answer goes on with what the prompt has begun to say, and not with a message's header."""

    def reader(self) -> "HarmonyReader":
        return HarmonyReader(self)


class _State(Enum):
    BEFORE = auto()
    """A header may come, or text without one."""
    HEADER = auto()
    BODY = auto()


class _Kind(Enum):
    REASONING = auto()
    CONTENT = auto()
    ADDRESSED = auto()
    """To a tool."""


class HarmonyReader:
    """See `AnswerReader`. Messages of the channel `analysis` are reasoning, those to the person content.

    Those to a tool are content too, in one form, `CALL_OPENING`, recipient, `<|message|>`, text, `<|call|>`, which a
    parser of tool calls takes out. Nothing is lost but headers and marks. Messages of one kind are apart by a line.
    """

    __slots__ = ("_held", "_kind", "_message_start", "_num_read", "_ranges", "_state", "_token_starts", "_was_said")

    def __init__(self, start: HarmonyStart) -> None:
        self._state = _State.BODY if start.is_in_message else _State.BEFORE
        self._kind = _Kind.CONTENT
        self._held = ""
        """What may be a header or the beginning of a mark."""
        self._was_said: dict[_Kind, bool] = {}
        """Of each kind: whether the message that is being read is the one that said something last."""
        self._num_read = 0
        """Characters before `_held`."""
        self._message_start = 0
        self._ranges: list[list[int]] = []
        """Characters of reasoning with its marks: [start, end], of the one being read without an end."""
        self._token_starts: list[int] = []

    def take_token(self, token_id: int, start: int) -> None:
        """See `AnswerReader`."""
        self._token_starts.append(start)

    @property
    def num_tokens(self) -> int:
        """Of reasoning and its marks."""
        starts = self._token_starts
        return sum(
            (bisect_left(starts, bounds[1]) if len(bounds) > 1 else len(starts)) - bisect_left(starts, bounds[0])
            for bounds in self._ranges
        )

    def feed(self, text: str) -> tuple[str, str]:
        """Reasoning and content that became certain."""
        self._held += text
        reasoning, content = [], []
        while (read := self._advance()) is not None:
            (reasoning if self._kind is _Kind.REASONING else content).append(read)
        return "".join(reasoning), "".join(content)

    def finish(self) -> tuple[str, str]:
        """The rest, once no text follows."""
        if self._state is _State.HEADER:
            return "", ""
        said = self._said(self._cut(len(self._held)))
        return (said, "") if self._kind is _Kind.REASONING else ("", said)

    def _advance(self) -> str | None:
        """What was read, of `_kind`; None where it takes more text."""
        match self._state:
            case _State.BEFORE:
                return self._seek_header()
            case _State.HEADER:
                return self._read_header()
            case _State.BODY:
                return self._read_body()

    def _seek_header(self) -> str | None:
        text = self._held.lstrip()
        if text.startswith((CHANNEL, _RECIPIENT)):
            self._state = _State.HEADER
        elif CHANNEL.startswith(text) or _RECIPIENT.startswith(text):
            return None
        else:
            self._state = _State.BODY
        return ""

    def _read_header(self) -> str | None:
        end = self._held.find(MESSAGE)
        if end < 0 and len(self._held) <= _MAX_HEADER:
            return None
        self._state = _State.BODY
        if end < 0:
            self._begin(_Kind.CONTENT)
            return ""
        header = self._cut(end + len(MESSAGE))
        channel, recipient = _CHANNEL_NAME.search(header), _RECIPIENT_NAME.search(header)
        if recipient is not None:
            self._begin(_Kind.ADDRESSED)
            return f"{CALL_OPENING}{recipient[1]}{MESSAGE}"
        self._begin(_Kind.REASONING if channel is not None and channel[1] == _ANALYSIS else _Kind.CONTENT)
        return ""

    def _begin(self, kind: _Kind) -> None:
        self._kind = kind
        self._was_said = dict.fromkeys(self._was_said, False)
        if kind is _Kind.REASONING:
            self._ranges.append([self._message_start])

    def _read_body(self) -> str | None:
        found = [(start, mark) for mark in _ENDS if (start := self._held.find(mark)) >= 0]
        if not found:
            said = self._said(self._cut(len(self._held) - max(overlap(self._held, mark) for mark in _ENDS)))
            return said or None
        start, mark = min(found)
        said = self._said(self._cut(start))
        if mark != START:
            self._cut(len(mark))
        if self._kind is _Kind.REASONING:
            self._ranges[-1].append(self._num_read)
        self._state, self._message_start = _State.HEADER, self._num_read
        return said + CALL if self._kind is _Kind.ADDRESSED else said

    def _said(self, text: str) -> str:
        if not text:
            return ""
        is_another = self._was_said.get(self._kind) is False and self._kind is not _Kind.ADDRESSED
        self._was_said[self._kind] = True
        return f"\n{text}" if is_another else text

    def _cut(self, length: int) -> str:
        cut, self._held = self._held[:length], self._held[length:]
        self._num_read += length
        return cut
