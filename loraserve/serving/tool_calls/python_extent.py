"""Finds the end of a Python call or literal in text that arrives in pieces."""

import re

from loraserve.serving.tool_calls.json_extent import Extent

OUTSIDE_STRINGS = re.compile(r"""[^"'()\[\]{}]*""")
IN_STRINGS = {quote: re.compile(rf"[^{quote}\\]*") for quote in "\"'"}
CLOSING = {"(": ")", "[": "]", "{": "}"}


class PythonExtent:
    """Examines only brackets and strings, and each character once. A string in three quotes counts as several."""

    __slots__ = ("_brackets", "_is_escaped", "_quote", "state")

    def __init__(self) -> None:
        self._brackets: list[str] = []
        self._quote = ""
        """Of the string it is in."""
        self._is_escaped = False
        self.state = Extent.OPEN

    def feed(self, text: str) -> int:
        """As `JsonExtent.feed`. It closes with the first bracket's partner."""
        position = 0
        while position < len(text) and self.state is Extent.OPEN:
            if not self._is_escaped:
                found = (IN_STRINGS[self._quote] if self._quote else OUTSIDE_STRINGS).match(text, position)
                assert found is not None
                position = found.end()
                if position == len(text):
                    break
            self._take(text[position])
            if self.state is not Extent.BROKEN:
                position += 1
        return position

    def _take(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif self._quote:
            self._is_escaped = char == "\\"
            self._quote = self._quote if self._is_escaped else ""
        elif char in IN_STRINGS:
            self._quote = char
        elif char in CLOSING:
            self._brackets.append(CLOSING[char])
        elif not self._brackets or self._brackets.pop() != char:
            self.state = Extent.BROKEN
        elif not self._brackets:
            self.state = Extent.CLOSED
