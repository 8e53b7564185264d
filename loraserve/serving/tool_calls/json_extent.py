"""Finds the end of a JSON object or array in text that arrives in pieces."""

import re
from enum import Enum, auto

OUTSIDE_STRINGS = re.compile(r"[ \t\r\n,:0-9eE+.\-truefalsn]*")
IN_STRINGS = re.compile(r'[^"\\\x00-\x1f]*')


class Extent(Enum):
    OPEN = auto()
    CLOSED = auto()
    BROKEN = auto()
    """Not JSON, whatever follows."""


class JsonExtent:
    """Examines only brackets and strings, and each character once. Leaves it to a decoder to check that the text is
    valid JSON, and to its recipient to limit the nesting."""

    __slots__ = ("_depth", "_in_string", "_is_escaped", "state")

    def __init__(self, depth: int = 0) -> None:
        """depth: number of brackets already open."""
        self._depth = depth
        self._in_string = False
        self._is_escaped = False
        self.state = Extent.OPEN

    @property
    def is_in_string(self) -> bool:
        return self.state is Extent.OPEN and self._in_string

    def feed(self, text: str) -> int:
        """The number of characters of `text` that belong to it: all, unless `state` becomes closed or broken. The first
        text must begin with the opening bracket, unless one is already open."""
        position = 0
        while self.state is Extent.OPEN:
            if not self._is_escaped:
                plain = IN_STRINGS if self._in_string else OUTSIDE_STRINGS
                position = _end_of(plain, text, position)
            if position == len(text):
                break
            self._take(text[position])
            if self.state is not Extent.BROKEN:
                position += 1
        return position

    def _take(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif self._in_string:
            self._take_in_string(char)
        else:
            self._take_outside(char)

    def _take_in_string(self, char: str) -> None:
        match char:
            case '"':
                self._in_string = False
            case "\\":
                self._is_escaped = True
            case _:
                self.state = Extent.BROKEN

    def _take_outside(self, char: str) -> None:
        match char:
            case '"':
                self._in_string = True
            case "{" | "[":
                self._depth += 1
            case "}" | "]":
                self._depth -= 1
                if self._depth == 0:
                    self.state = Extent.CLOSED
            case _:
                self.state = Extent.BROKEN


def _end_of(pattern: re.Pattern[str], text: str, position: int) -> int:
    found = pattern.match(text, position)
    assert found is not None
    return found.end()
