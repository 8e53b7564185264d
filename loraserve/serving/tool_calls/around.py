"""What parsers of all formats have in common: the text around calls."""

from abc import ABC, abstractmethod
from enum import Enum, auto
from typing import Protocol

from loraserve.serving.text.found import CallArguments, Found, content_joined
from loraserve.serving.text.stop_strings import overlap
from loraserve.serving.tool_calls.formats import CallSyntax
from loraserve.serving.tool_calls.json_extent import Extent

MAX_AROUND = 128
"""Maximum number of characters between an opening and its call, and between the call and its closing."""
PIECE = 1024
"""Characters processed at once: the remainder is copied for each mark found, and an answer may be a megabyte of marks,
which took 14 s as a single piece."""


class CallParser(Protocol):
    """Finds tool calls in an answer that arrives in pieces. The outcome depends only on the text, not on how it was cut
    into pieces."""

    def feed(self, text: str) -> list[Found]:
        """The content and call parts that became certain, in order."""
        ...

    def finish(self) -> list[Found]:
        """The rest, after the last text."""
        ...

    @property
    def arguments(self) -> Extent | None:
        """State of the arguments being read, open or broken; None = none are. Query it before `finish`."""
        ...


class State(Enum):
    CONTENT = auto()
    """Before an opening."""
    HEAD = auto()
    """Between an opening and a call."""
    CALL = auto()
    """In a call, or between those of a list."""
    CLOSING = auto()


class AroundCalls(ABC):
    """Finds openings and closings, and holds back text that may turn out to be a call. See `CallParser`.

    Everything that is not a call is content. Only the syntax of calls is lost, and white space if the answer consists
    only of calls.
    """

    def __init__(self, syntax: CallSyntax) -> None:
        self._syntax = syntax
        self._state = State.CONTENT
        self._text = ""
        """Not processed yet, or too short to decide."""
        self._held: list[str] = []
        """Text before `_text`: content, unless it belongs to a call."""
        self._only_calls = True
        """Whether there was no content yet, or none since the last call."""
        self._found: list[Found] = []
        self._has_called = False

    def feed(self, text: str) -> list[Found]:
        """See `CallParser`."""
        for start in range(0, len(text), PIECE):
            self._text += text[start : start + PIECE]
            while self._advance():
                pass
        return self._taken()

    def finish(self) -> list[Found]:
        """See `CallParser`."""
        match self._state:
            case State.CALL:
                self._finish_call()
            case State.CLOSING if self._syntax.closing.startswith(self._text.strip()):
                self._end_call()
            case State.CONTENT if self._has_called and not self._text:
                pass
            case _:
                self._release(self._text)
        self._text = ""
        return self._taken()

    def _taken(self) -> list[Found]:
        taken = [*content_joined(self._found)]
        self._found.clear()
        return taken

    def _advance(self) -> bool:
        """False if more text is needed."""
        match self._state:
            case State.CONTENT:
                return self._seek_opening()
            case State.HEAD:
                return self._read_head()
            case State.CALL:
                return self._read_call()
            case State.CLOSING:
                return self._read_closing()

    @abstractmethod
    def _read_head(self) -> bool: ...

    @abstractmethod
    def _read_call(self) -> bool: ...

    @abstractmethod
    def _finish_call(self) -> None:
        """The answer ended within a call."""

    def _seek_opening(self) -> bool:
        opening = self._syntax.opening
        if self._only_calls:
            self._hold(len(self._text) - len(self._text.lstrip(self._syntax.between)))
            if not self._text or (len(self._text) < len(opening) and opening.startswith(self._text)):
                return False
            if self._syntax.may_begin_bare and self._text.startswith("{"):
                self._state = State.HEAD
                return True
            if not self._text.startswith(opening):
                self._release()
        # An empty opening matches only at the beginning of the answer.
        start = self._text.find(opening) if opening or self._only_calls else -1
        if start < 0:
            self._release(self._cut(len(self._text) - overlap(self._text, opening)))
            return False
        if start > 0:
            self._release(self._cut(start))
        self._hold(len(opening))
        self._state = State.HEAD
        return True

    def _read_closing(self) -> bool:
        closing, rest = self._syntax.closing, self._text.lstrip()
        num_blank = len(self._text) - len(rest)
        if num_blank < MAX_AROUND and closing.startswith(rest) and rest != closing:
            return False
        if num_blank < MAX_AROUND and rest.startswith(closing):
            self._cut(num_blank + len(closing))
        self._end_call()
        return True

    def _add_arguments(self, arguments: str) -> None:
        if arguments:
            self._found.append(CallArguments(arguments))

    def _end_call(self) -> None:
        """Ends a call or a list of calls."""
        self._held.clear()
        self._only_calls = True
        self._state = State.CONTENT

    def _cut(self, length: int) -> str:
        cut, self._text = self._text[:length], self._text[length:]
        return cut

    def _hold(self, length: int) -> None:
        if length:
            self._held.append(self._cut(length))

    def _release(self, more: str = "") -> None:
        """Emits the held text and `more` as content."""
        self._found += [piece for piece in (*self._held, more) if piece]
        self._held.clear()
        self._only_calls = False
        self._state = State.CONTENT
