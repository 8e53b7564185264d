"""Finds tool calls in an answer that arrives in pieces, and holds back what may turn out to be one."""

import re
from enum import Enum, auto

import msgspec

from loraserve.serving.stop_strings import overlap
from loraserve.serving.tool_calls.formats import SYNTAXES, FoundCall, ToolCallFormat
from loraserve.serving.tool_calls.json_extent import Extent, JsonExtent

MAX_AROUND = 128
"""Characters between an opening and its JSON, and between the JSON and its closing."""


class _State(Enum):
    CONTENT = auto()
    """Before an opening."""
    HEAD = auto()
    JSON = auto()
    CLOSING = auto()


class ToolCallParser:
    """The outcome depends on the text alone, not on how it was cut into pieces.

    What is no call after all is content. Nothing is lost but the marks around calls, and white space where calls are
    all that the answer has.
    """

    def __init__(self, call_format: ToolCallFormat) -> None:
        self._syntax = SYNTAXES[call_format]
        self._state = _State.CONTENT
        self._text = ""
        """Not looked at yet, or too short to tell."""
        self._held: list[str] = []
        """Before `_text`: content, unless it becomes a call."""
        self._num_before_json = 0
        """Pieces of `_held`."""
        self._extent = JsonExtent()
        self._head: re.Match[str] | None = None
        self._only_calls = True
        """Whether there was no content yet, or none since the last call."""
        self._found: list[str | FoundCall] = []
        self._has_called = False

    def feed(self, text: str) -> list[str | FoundCall]:
        """The content and the calls that became certain, in order."""
        self._text += text
        while self._advance():
            pass
        return self._taken()

    def finish(self) -> list[str | FoundCall]:
        """The rest, once no text follows."""
        if self._state is _State.CLOSING and self._syntax.closing.startswith(self._text.strip()):
            self._end_call(self._text)
        elif self._state is not _State.CONTENT or self._text or not self._has_called:
            self._release(self._text)
        self._text = ""
        return self._taken()

    def _taken(self) -> list[str | FoundCall]:
        found, self._found = self._found, []
        return found

    def _advance(self) -> bool:
        """False where it takes more text."""
        match self._state:
            case _State.CONTENT:
                return self._seek_opening()
            case _State.HEAD:
                return self._read_head()
            case _State.JSON:
                return self._read_json()
            case _State.CLOSING:
                return self._read_closing()

    def _seek_opening(self) -> bool:
        opening = self._syntax.opening
        if self._only_calls:
            self._hold(len(self._text) - len(self._text.lstrip(self._syntax.between)))
            if not self._text or (len(self._text) < len(opening) and opening.startswith(self._text)):
                return False
            if self._syntax.may_begin_bare and self._text.startswith("{"):
                self._state = _State.HEAD
                return True
            if not self._text.startswith(opening):
                self._release()
        start = self._text.find(opening)
        if start < 0:
            self._release(self._cut(len(self._text) - overlap(self._text, opening)))
            return False
        if start > 0:
            self._release(self._cut(start))
        self._hold(len(opening))
        self._state = _State.HEAD
        return True

    def _read_head(self) -> bool:
        brace = self._text.find("{", 0, MAX_AROUND)
        if brace < 0 and len(self._text) < MAX_AROUND:
            return False
        self._head = self._syntax.head.fullmatch(self._text, 0, max(brace, 0))
        if brace < 0 or self._head is None:
            self._release()
            return True
        is_array = self._head.groupdict().get("array") is not None
        self._hold(self._head.start("array") if is_array else brace)
        self._num_before_json, self._extent = len(self._held), JsonExtent()
        self._state = _State.JSON
        return True

    def _read_json(self) -> bool:
        self._hold(self._extent.feed(self._text))
        match self._extent.state:
            case Extent.OPEN:
                return False
            case Extent.BROKEN:
                self._release()
            case Extent.CLOSED if self._syntax.closing:
                self._state = _State.CLOSING
            case Extent.CLOSED:
                self._end_call("")
        return True

    def _read_closing(self) -> bool:
        closing, rest = self._syntax.closing, self._text.lstrip()
        num_blank = len(self._text) - len(rest)
        if num_blank < MAX_AROUND and rest.startswith(closing):
            self._end_call(self._cut(num_blank + len(closing)))
        elif num_blank < MAX_AROUND and closing.startswith(rest):
            return False
        else:
            self._release()
        return True

    def _end_call(self, closing: str) -> None:
        assert self._head is not None
        try:
            calls = self._syntax.read(self._head, "".join(self._held[self._num_before_json :]))
        except (msgspec.DecodeError, RecursionError):
            self._release(closing)
            return
        self._found += calls
        self._has_called = True
        self._held.clear()
        self._only_calls = True
        self._state = _State.CONTENT

    def _cut(self, length: int) -> str:
        cut, self._text = self._text[:length], self._text[length:]
        return cut

    def _hold(self, length: int) -> None:
        if length:
            self._held.append(self._cut(length))

    def _release(self, more: str = "") -> None:
        """What is held, and `more`, is content."""
        content = "".join([*self._held, more])
        match self._found:
            case [*_, str() as before]:
                self._found[-1] = before + content
            case _ if content:
                self._found.append(content)
        self._held.clear()
        self._only_calls = False
        self._state = _State.CONTENT
