"""Reads an answer in OpenAI's harmony format (gpt-oss): messages that name a channel and optionally a recipient."""

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from loraserve.serving.text.conversation import FUNCTION_NAME
from loraserve.serving.text.found import CallArguments, CallBegun, CallPart

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, MESSAGE, END, CALL, RETURN, "<|constrain|>")
_ENDS = (END, CALL, RETURN)
"""Marks that end a message."""
FINAL = "final"
"""The channel of the answer to the user."""
FUNCTIONS = "functions."
_ANALYSIS, _ASSISTANT = "analysis", "assistant"
_MAX_HEADER = 256
"""Characters."""
_ROLE = re.compile(re.escape(START) + r"\s*([^\s<]+)")
_CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


@dataclass(frozen=True, slots=True)
class HarmonyStart:
    """The possible beginning of an answer."""

    marks: Mapping[int, str]
    """By token id: other tokens with the same text are not marks."""
    tool_names: frozenset[str] | None = None
    """Functions that are recognized even without `functions.`; None = calls are not recognized."""
    is_in_message: bool = False
    """Whether the answer continues a message that the prompt began, instead of beginning with a header."""

    def reader(self) -> "HarmonyReader":
        return HarmonyReader(self)


class _State(Enum):
    BEFORE = auto()
    """A header may follow, or text without one."""
    HEADER = auto()
    BODY = auto()


class _Kind(Enum):
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()
    OTHERS = auto()
    """From another role than the assistant, such as a tool result that the model made up."""


class HarmonyReader:
    """See `AnswerReader`. Messages on the channel `analysis` are reasoning, those to a function calls, others content.

    Headers, marks and messages of other roles are not shown. Messages of the same kind are separated by a newline.
    """

    __slots__ = (
        "_calls",
        "_content",
        "_has_arguments",
        "_header",
        "_is_new",
        "_kind",
        "_marks",
        "_num_reasoning_tokens",
        "_position",
        "_reasoning",
        "_seen_kinds",
        "_start",
        "_state",
        "_text",
        "_token_starts",
    )

    def __init__(self, start: HarmonyStart) -> None:
        self._start = start
        self._state = _State.BODY if start.is_in_message else _State.BEFORE
        self._kind = _Kind.CONTENT
        self._header = ""
        """The header with its marks; before it, text that may be the beginning of a header without marks."""
        self._marks: deque[tuple[int, str]] = deque()
        """Unread marks, each with its start in characters."""
        self._text = ""
        """Unread text."""
        self._position = 0
        """Start of `_text` in the answer, in characters."""
        self._token_starts: deque[int] = deque()
        """Starts of the tokens of the current message."""
        self._num_reasoning_tokens = 0
        """In earlier messages."""
        self._seen_kinds: set[_Kind] = set()
        self._is_new = False
        """Whether the message has no text yet."""
        self._has_arguments = False
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[CallPart] = []

    def take_token(self, token_id: int, start: int) -> None:
        """See `AnswerReader`."""
        self._token_starts.append(start)
        if (mark := self._start.marks.get(token_id)) is not None:
            self._marks.append((start, mark))

    @property
    def num_tokens(self) -> int:
        """See `AnswerReader`."""
        is_reasoning = self._state is _State.BODY and self._kind is _Kind.REASONING
        return self._num_reasoning_tokens + (len(self._token_starts) if is_reasoning else 0)

    def feed(self, text: str) -> tuple[str, str]:
        """See `AnswerReader`."""
        self._text += text
        while self._marks and self._marks[0][0] <= self._position + len(self._text):
            start, mark = self._marks[0]
            self._read(self._cut(start - self._position))
            if len(self._text) < len(mark):
                break
            self._cut(len(mark))
            self._marks.popleft()
            self._read_mark(mark)
        else:
            self._read(self._cut(len(self._text)))
        return self._taken()

    def finish(self) -> tuple[str, str]:
        """See `AnswerReader`. A mark that is still unread ended the answer: such a token has no text."""
        if self._marks and self._state is _State.BODY and self._marks[0][1] in _ENDS:
            self._end_message()
        elif self._state is _State.BEFORE:
            self._flush_header()
        return self._taken()

    def taken_calls(self) -> list[CallPart]:
        """See `AnswerReader`."""
        taken, self._calls = self._calls, []
        return taken

    def _taken(self) -> tuple[str, str]:
        taken = "".join(self._reasoning), "".join(self._content)
        self._reasoning.clear()
        self._content.clear()
        return taken

    def _read(self, text: str) -> None:
        """Reads text between marks."""
        if not text:
            return
        if self._state is _State.BODY:
            self._append_text(text)
            return
        self._header += text
        is_header = self._state is _State.HEADER or _may_be_recipient(self._header)
        if len(self._header) > _MAX_HEADER or not is_header:
            self._flush_header()

    def _flush_header(self) -> None:
        """It was not a header: treats it as content."""
        held = self._header
        self._begin(_Kind.CONTENT)
        if held:
            self._append_text(held)

    def _read_mark(self, mark: str) -> None:
        is_in_body = self._state is _State.BODY
        if is_in_body and mark in (*_ENDS, START, CHANNEL):
            self._end_message()
            self._header = ""
        if mark in _ENDS:
            self._state, self._header = _State.BEFORE, ""
        elif mark in (START, CHANNEL):
            self._state = _State.HEADER
            self._header = mark if mark == START else self._header + mark
        elif mark == MESSAGE and not is_in_body:
            self._begin(self._kind_of_header())
        else:
            self._header += " "

    def _kind_of_header(self) -> _Kind:
        """Also begins the call, if it is one."""
        role, recipient = _ROLE.search(self._header), _RECIPIENT.search(self._header)
        channels = _CHANNEL_NAME.findall(self._header)
        if role is not None and role[1] != _ASSISTANT:
            return _Kind.OTHERS
        if recipient is not None and self._start.tool_names is not None:
            name = recipient[1].removeprefix(FUNCTIONS)
            is_function = recipient[1].startswith(FUNCTIONS) or name in self._start.tool_names
            if is_function and FUNCTION_NAME.fullmatch(name):
                self._calls.append(CallBegun(name))
                return _Kind.CALL
        return _Kind.REASONING if channels[-1:] == [_ANALYSIS] else _Kind.CONTENT

    def _begin(self, kind: _Kind) -> None:
        self._state, self._kind, self._header = _State.BODY, kind, ""
        self._is_new, self._has_arguments = True, False

    def _append_text(self, text: str) -> None:
        if self._kind is _Kind.CALL:
            self._calls.append(CallArguments(text))
            self._has_arguments = True
        elif self._kind is not _Kind.OTHERS:
            parts = self._reasoning if self._kind is _Kind.REASONING else self._content
            if self._is_new and self._kind in self._seen_kinds:
                parts.append("\n")
            parts.append(text)
            self._seen_kinds.add(self._kind)
            self._is_new = False

    def _end_message(self) -> None:
        """The message's tokens are those that start before the unread text."""
        if self._kind is _Kind.CALL and not self._has_arguments:
            self._calls.append(CallArguments("{}"))
        num_tokens = 0
        while self._token_starts and self._token_starts[0] < self._position:
            self._token_starts.popleft()
            num_tokens += 1
        self._num_reasoning_tokens += num_tokens if self._kind is _Kind.REASONING else 0

    def _cut(self, length: int) -> str:
        cut, self._text = self._text[:length], self._text[length:]
        self._position += length
        return cut


def _may_be_recipient(text: str) -> bool:
    """Whether the text may begin a header whose recipient comes before its channel."""
    text = text.lstrip()
    return text.startswith("to=") or "to=".startswith(text)
