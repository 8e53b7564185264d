"""Python literals as models write them, read without evaluating anything."""

import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
MAX_DEPTH = 32
"""Levels of nesting, as many as requests may have."""
BLANK = re.compile(r"[ \t\r\n]*")
NAME = re.compile(r"[^\W\d]\w*")
NUMBER = re.compile(r"[+-]?(?:\d[\d_]*(?:\.[\d_]*)?|\.\d[\d_]*)(?:[eE][+-]?\d+)?")
IN_STRING = {quote: re.compile(rf"[^\\{quote}]*") for quote in "'\""}
ESCAPED = re.compile(r"x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|\r\n|.", re.DOTALL)
ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\n": "", "\r\n": ""}
ESCAPES |= {char: char for char in "\\'\"/"}
"""JSON's are among them."""
NAMED = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
"""JSON's names too, as in vLLM."""
MAX_NUMBER_CHARS = 400
"""Python takes quadratic time for longer integers, and refuses those of more than 4,300 digits."""


class NotALiteral(Exception):
    pass


class LiteralReader:
    """Reads one literal after another from a text. Values are such that JSON can express them."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        self._had_comma = False
        """Whether the sequence that ended last had one."""

    @property
    def is_at_end(self) -> bool:
        return self._position == len(self._text)

    def take(self, char: str) -> bool:
        """Whether it came next, after white space. If so, it and the white space after it are read."""
        self._read(BLANK)
        if not self._text.startswith(char, self._position):
            return False
        self._position += len(char)
        self._read(BLANK)
        return True

    def expect(self, char: str) -> None:
        """Raises `NotALiteral`."""
        if not self.take(char):
            raise NotALiteral

    def name(self, pattern: re.Pattern[str] = NAME) -> str:
        """Raises `NotALiteral`."""
        self._read(BLANK)
        name = self._read(pattern)
        if not name:
            raise NotALiteral
        return name

    def value(self, depth: int = 0) -> Any:
        """Raises `NotALiteral`. depth: levels around it."""
        if depth > MAX_DEPTH:
            raise NotALiteral
        self._read(BLANK)
        match self._text[self._position : self._position + 1]:
            case "'" | '"' as quote:
                return self._string(quote)
            case "[":
                return self.sequence("[", "]", lambda: self.value(depth + 1))
            case "(":
                return self._in_parentheses(depth)
            case "{":
                return self._dict(depth)
            case _:
                return self._number_or_name()

    def _in_parentheses(self, depth: int) -> Any:
        """A tuple becomes a list."""
        values = self.sequence("(", ")", lambda: self.value(depth + 1))
        return values[0] if values and not self._had_comma else values

    def _dict(self, depth: int) -> dict[str, Any]:
        def entry() -> tuple[str, Any]:
            key = self.value(depth + 1)
            self.expect(":")
            return _as_key(key), self.value(depth + 1)

        return dict(self.sequence("{", "}", entry))

    def sequence(self, opening: str, closing: str, read: Callable[[], T]) -> list[T]:
        """Raises `NotALiteral`."""
        self.expect(opening)
        values: list[T] = []
        has_comma = False
        while not self.take(closing):
            if values:
                self.expect(",")
                has_comma = True
                if self.take(closing):
                    break
            values.append(read())
        self._had_comma = has_comma
        return values

    def _string(self, quote: str) -> str:
        """Line breaks may be in any string: models do not escape them reliably."""
        triple = quote * 3
        end = triple if self._text.startswith(triple, self._position) else quote
        self._position += len(end)
        parts: list[str] = []
        while not self._text.startswith(end, self._position):
            parts.append(self._read(IN_STRING[quote]))
            match self._text[self._position : self._position + 1]:
                case "":
                    raise NotALiteral
                case "\\":
                    self._position += 1
                    parts.append(_unescaped(self._read(ESCAPED)))
                case _ if not self._text.startswith(end, self._position):
                    parts.append(quote)
                    self._position += 1
                case _:
                    pass
        self._position += len(end)
        # Two escaped surrogates, as in JSON, are one character.
        return "".join(parts).encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _number_or_name(self) -> Any:
        text = self._read(NUMBER)
        if not text:
            name = self.name()
            if name not in NAMED:
                raise NotALiteral
            return NAMED[name]
        digits = text.replace("_", "")
        if len(digits) > MAX_NUMBER_CHARS:
            raise NotALiteral
        if digits.lstrip("+-").isdecimal():
            return int(digits)
        number = float(digits)
        if not math.isfinite(number):
            raise NotALiteral
        return number

    def _read(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self._position)
        if found is None:
            return ""
        self._position = found.end()
        return found.group()


def read_literal(text: str) -> Any:
    """Raises `NotALiteral`."""
    reader = LiteralReader(text)
    value = reader.value()
    reader.take("")
    if not reader.is_at_end:
        raise NotALiteral
    return value


def _as_key(key: Any) -> str:
    """As `json.dumps` writes keys."""
    match key:
        case str():
            return key
        case True | False:
            return str(key).lower()
        case None:
            return "null"
        case int() | float():
            return str(key)
        case _:
            raise NotALiteral


def _unescaped(escaped: str) -> str:
    """escaped: the text after a backslash."""
    if not escaped:
        raise NotALiteral
    if escaped in ESCAPES:
        return ESCAPES[escaped]
    if escaped[0] in "01234567":
        return chr(int(escaped, 8))
    if escaped[0] in "xuU" and len(escaped) > 1:
        code = int(escaped[1:], 16)
        if code > 0x10FFFF:
            raise NotALiteral
        return chr(code)
    return "\\" + escaped
