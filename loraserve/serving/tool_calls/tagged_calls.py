"""Finds tool calls whose arguments are tagged texts: `<function=name><parameter=name>text</parameter></function>`."""

import re
from collections.abc import Mapping
from copy import copy
from enum import Enum, auto
from typing import Any

from loraserve.serving.text.conversation import FUNCTION_NAME
from loraserve.serving.text.found import CallBegun
from loraserve.serving.text.stop_strings import overlap
from loraserve.serving.tool_calls.around import MAX_AROUND, AroundCalls, State
from loraserve.serving.tool_calls.formats import CallSyntax
from loraserve.serving.tool_calls.json_extent import Extent, JsonExtent
from loraserve.serving.tool_calls.parameter_types import ARRAY, OBJECT, converted, stays_text, string_json, types_of

FUNCTION, END_OF_FUNCTION = "<function=", "</function>"
PARAMETER, END_OF_PARAMETER = "<parameter=", "</parameter>"
MAX_NAME = 256
"""Characters of a parameter's name."""
PARAMETER_TAG = re.compile(rf"{PARAMETER}(?P<name>[^<>\n]{{1,{MAX_NAME}}})>")
MAX_TAG = len(PARAMETER) + MAX_NAME + 1


class _Within(Enum):
    """Where in a call."""

    PARAMETERS = auto()
    """Between parameters."""
    START = auto()
    """Directly after a parameter's tag."""
    VALUE = auto()


class TaggedCallParser(AroundCalls):
    """See `CallParser`.

    Something counts as a call once its function's tag is complete. Texts that can only be strings are emitted as they
    arrive, others once they are complete.
    """

    def __init__(self, syntax: CallSyntax, tools: Mapping[str, Any]) -> None:
        """tools: the schema of each function's parameters."""
        super().__init__(syntax)
        self._tools = tools
        self._within = _Within.PARAMETERS
        self._schema: Mapping[str, Any] = {}
        """Of the call's parameters."""
        self._types = frozenset[str]()
        """Of the current parameter."""
        self._value: list[str] = []
        """What has arrived of a text that is to be converted."""
        self._extent = JsonExtent()
        """Extent of that text, if it may be an object or array."""
        self._num_parameters = 0
        self._ends = [END_OF_PARAMETER, f"{END_OF_FUNCTION}\n{syntax.closing}"]
        """What ends a value; the last one if the model forgets the first."""

    @property
    def arguments(self) -> Extent | None:
        """See `CallParser`."""
        return Extent.OPEN if self._state is State.CALL else None

    def _read_head(self) -> bool:
        rest = self._text.lstrip()
        num_blank = len(self._text) - len(rest)
        name, found, _ = rest[len(FUNCTION) : len(FUNCTION) + MAX_AROUND].partition(">")
        if num_blank > MAX_AROUND or not (rest.startswith(FUNCTION) or FUNCTION.startswith(rest)):
            self._release()
        elif not found and len(rest) < len(FUNCTION) + MAX_AROUND:
            return False
        elif not found or not FUNCTION_NAME.fullmatch(name.strip()):
            self._release()
        else:
            self._cut(num_blank + len(FUNCTION) + len(name) + 1)
            self._begin_call(name.strip())
        return True

    def _begin_call(self, name: str) -> None:
        self._held.clear()
        self._found.append(CallBegun(name))
        self._add_arguments("{")
        self._has_called = True
        self._num_parameters = 0
        schema = self._tools.get(name)
        self._schema = schema if isinstance(schema, dict) else {}
        self._state, self._within = State.CALL, _Within.PARAMETERS

    def _read_call(self) -> bool:
        match self._within:
            case _Within.PARAMETERS:
                return self._read_parameters()
            case _Within.START:
                return self._read_start()
            case _Within.VALUE:
                return self._read_value()

    def _read_parameters(self) -> bool:
        self._cut(len(self._text) - len(self._text.lstrip()))
        if tag := PARAMETER_TAG.match(self._text):
            self._cut(tag.end())
            self._begin_parameter(tag["name"].strip())
            return True
        if self._text.startswith(PARAMETER) and len(self._text) <= MAX_TAG and not {*"\n<>"} & {*self._text[1:]}:
            return False
        if any(tag.startswith(self._text) and tag != self._text for tag in (PARAMETER, END_OF_FUNCTION)):
            return False
        self._add_arguments("}")
        if self._text.startswith(END_OF_FUNCTION):
            self._cut(len(END_OF_FUNCTION))
            self._state = State.CLOSING
        elif self._text.startswith("</"):
            self._state = State.CLOSING
        else:
            self._release()
        return True

    def _begin_parameter(self, name: str) -> None:
        properties = self._schema.get("properties")
        self._types = types_of(properties.get(name) if isinstance(properties, dict) else None, self._schema)
        self._add_arguments(f"{', ' if self._num_parameters else ''}{string_json(name)}: ")
        self._num_parameters += 1
        self._value.clear()
        self._extent = JsonExtent()
        self._within = _Within.START

    def _read_start(self) -> bool:
        if not self._text:
            return False
        self._cut(1 if self._text.startswith("\n") else 0)
        if stays_text(self._types):
            self._add_arguments('"')
        self._within = _Within.VALUE
        return True

    def _read_value(self) -> bool:
        """Reads up to an end. A line break before it is not part of the value."""
        found = [(start, end) for end in self._ends if (start := self._text.find(end)) >= 0]
        if not found:
            ends = (*self._ends, *(f"\n{end}" for end in self._ends))
            num_held = max(overlap(self._text, end) for end in ends)
            self._take_value(self._cut(len(self._text) - num_held))
            return False
        start, end = min(found)
        if self._is_in_string(self._text[:start]):
            self._take_value(self._cut(start + 1))
            return True
        self._take_value(self._cut(start).removesuffix("\n"))
        if end == END_OF_PARAMETER:
            self._cut(len(end))
        if stays_text(self._types):
            self._add_arguments('"')
        else:
            self._add_arguments(converted("".join(self._value), self._types))
        self._within = _Within.PARAMETERS
        return True

    def _take_value(self, text: str) -> None:
        if stays_text(self._types):
            self._add_arguments(string_json(text)[1:-1])
        else:
            self._value.append(text)
            self._extent.feed(text)

    def _is_in_string(self, text: str) -> bool:
        """Whether the value is JSON that after `text` is within a string, where an end is not one."""
        if not self._types & {OBJECT, ARRAY}:
            return False
        extent = copy(self._extent)
        extent.feed(text)
        return extent.is_in_string

    def _read_closing(self) -> bool:
        """Another function may follow instead."""
        rest = self._text.lstrip()
        if rest.startswith(FUNCTION):
            self._state = State.HEAD
            return True
        return not FUNCTION.startswith(rest) and super()._read_closing()

    def _finish_call(self) -> None:
        """The call was cut off, and so are its arguments."""
        if self._within is _Within.VALUE and not stays_text(self._types):
            self._add_arguments("".join(self._value).strip())
        self._held.clear()
