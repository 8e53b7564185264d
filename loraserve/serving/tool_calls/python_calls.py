"""Finds tool calls that are written as calls in Python: `[name(argument="text", other=[1]), …]`."""

import json
from typing import Any

from loraserve.serving.text.conversation import FUNCTION_NAME
from loraserve.serving.text.found import CallBegun
from loraserve.serving.text.stop_strings import overlap
from loraserve.serving.tool_calls.around import MAX_AROUND, AroundCalls, State
from loraserve.serving.tool_calls.formats import CallSyntax
from loraserve.serving.tool_calls.json_extent import Extent
from loraserve.serving.tool_calls.python_extent import PythonExtent
from loraserve.serving.tool_calls.python_literal import LiteralReader, NotALiteral

BLANK = " \t\r\n"
SEPARATORS = f"{BLANK},"
"""Between the calls of a list."""


class PythonCallParser(AroundCalls):
    """See `CallParser`.

    A call is emitted once it is complete. What cannot be read as a call is content, with all that follows in its list.
    """

    def __init__(self, syntax: CallSyntax) -> None:
        super().__init__(syntax)
        self._num_calls = 0
        """Of the list."""
        self._name: str | None = None
        """Of the call whose arguments are being read."""
        self._arguments: list[str] = []
        """What has arrived of them. The text is also in `_held`."""
        self._extent = PythonExtent()

    @property
    def arguments(self) -> Extent | None:
        """See `CallParser`."""
        return Extent.OPEN if self._state is State.CALL and self._name is not None else None

    def _read_head(self) -> bool:
        rest = self._text.lstrip(BLANK)
        num_blank = len(self._text) - len(rest)
        if not rest and num_blank < MAX_AROUND:
            return False
        if rest.startswith("[") and num_blank < MAX_AROUND:
            self._hold(num_blank + 1)
            self._num_calls, self._name = 0, None
            self._state = State.CALL
        else:
            self._release()
        return True

    def _read_call(self) -> bool:
        return self._read_list() if self._name is None else self._read_arguments()

    def _read_list(self) -> bool:
        self._hold(len(self._text) - len(self._text.lstrip(SEPARATORS)))
        if self._text.startswith("]") and self._num_calls:
            self._cut(1)
            self._state = State.CLOSING
            return True
        bracket = self._text.find("(", 0, MAX_AROUND)
        if bracket < 0 and len(self._text) < MAX_AROUND and not self._text.startswith("]"):
            return False
        name = self._text[: max(bracket, 0)].strip(BLANK)
        if not FUNCTION_NAME.fullmatch(name):
            self._release()
            return True
        self._hold(bracket)
        self._name, self._extent = name, PythonExtent()
        self._arguments.clear()
        return True

    def _read_arguments(self) -> bool:
        """Nothing in them can be the closing, because models write that as one token."""
        closing = self._text.find(self._syntax.closing)
        end = closing if closing >= 0 else len(self._text) - overlap(self._text, self._syntax.closing)
        length = self._extent.feed(self._text[:end])
        self._arguments.append(self._text[:length])
        self._hold(length)
        if self._extent.state is Extent.OPEN and closing < 0:
            return False
        arguments = _read("".join(self._arguments)) if self._extent.state is Extent.CLOSED else None
        if arguments is None or self._name is None:
            self._release()
            return True
        self._held.clear()
        self._found.append(CallBegun(self._name))
        self._add_arguments(arguments)
        self._has_called = True
        self._num_calls += 1
        self._name = None
        return True

    def _finish_call(self) -> None:
        if self._num_calls and self._name is None and not ("".join(self._held) + self._text).strip(SEPARATORS):
            self._end_call()
        else:
            self._release(self._text)


def _read(text: str) -> str | None:
    """The arguments in parentheses as a JSON object; None if they are not literals with names."""
    reader = LiteralReader(text)
    try:
        named = reader.sequence("(", ")", lambda: _argument(reader))
    except NotALiteral:
        return None
    arguments = dict(named)
    return json.dumps(arguments, ensure_ascii=False) if len(arguments) == len(named) else None


def _argument(reader: LiteralReader) -> tuple[str, Any]:
    """Raises `NotALiteral`."""
    name = reader.name()
    reader.expect("=")
    return name, reader.value(depth=1)
