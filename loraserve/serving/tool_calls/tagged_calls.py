"""Finds tool calls whose arguments are tagged texts, such as `<parameter=name>text</parameter>`."""

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from loraserve.serving.text.found import CallBegun
from loraserve.serving.text.stop_strings import overlap
from loraserve.serving.tool_calls.around import AroundCalls, State
from loraserve.serving.tool_calls.formats import CallSyntax
from loraserve.serving.tool_calls.json_extent import Extent, JsonExtent
from loraserve.serving.tool_calls.parameter_types import ARRAY, OBJECT, converted, stays_text, string_json, types_of

MAX_NAME = 256
"""Characters of a parameter's name."""
NAME = rf"(?P<name>[^<>\n]{{1,{MAX_NAME}}})"


@dataclass(frozen=True, slots=True)
class ParameterTags:
    beginning: str
    """What a parameter begins with."""
    tag: re.Pattern[str]
    """Everything before a value. Group `name`: the parameter's name."""
    may_become_tag: Callable[[str], object]
    """Whether an incomplete text may turn out to be such a tag."""
    ends: tuple[str, ...]
    """What ends a value. The first belongs to it, others end it if the model forgets the first."""
    end_of_function: str
    """What follows the last parameter."""
    on_own_lines: bool
    """A line break next to a tag is not part of the value."""


class _Within(Enum):
    """Where in a call."""

    PARAMETERS = auto()
    """Between parameters."""
    START = auto()
    """Directly after a parameter's tag."""
    VALUE = auto()


class TaggedCallParser(AroundCalls):
    """See `CallParser`.

    Something counts as a call once its function's name is complete. Texts that can only be strings are emitted as they
    arrive, others once they are complete.
    """

    def __init__(self, syntax: CallSyntax, tags: ParameterTags, tools: Mapping[str, Any]) -> None:
        """tools: the schema of each function's parameters."""
        super().__init__(syntax)
        self._tags = tags
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

    @property
    def arguments(self) -> Extent | None:
        """See `CallParser`."""
        return Extent.OPEN if self._state is State.CALL else None

    @abstractmethod
    def _read_head(self) -> bool:
        """Calls `_begin_call` with the function's name, once it is complete."""

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
        beginning, end_of_function = self._tags.beginning, self._tags.end_of_function
        if tag := self._tags.tag.match(self._text):
            self._cut(tag.end())
            self._begin_parameter(tag["name"].strip())
            return True
        if self._tags.may_become_tag(self._text):
            return False
        if any(tag.startswith(self._text) and tag != self._text for tag in (beginning, end_of_function)):
            return False
        self._add_arguments("}")
        if self._text.startswith(end_of_function):
            self._end_function()
        elif self._text.startswith("</"):
            self._state = State.CLOSING
        else:
            self._release()
        return True

    def _end_function(self) -> None:
        self._cut(len(self._tags.end_of_function))
        self._state = State.CLOSING

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
        self._cut(1 if self._tags.on_own_lines and self._text.startswith("\n") else 0)
        if stays_text(self._types):
            self._add_arguments('"')
        self._within = _Within.VALUE
        return True

    def _read_value(self) -> bool:
        """Reads up to an end."""
        ends, on_own_lines = self._tags.ends, self._tags.on_own_lines
        found = [(start, end) for end in ends if (start := self._text.find(end)) >= 0]
        if not found:
            marks = (*ends, *(f"\n{end}" for end in ends if on_own_lines))
            num_held = max(overlap(self._text, mark) for mark in marks)
            self._take_value(self._cut(len(self._text) - num_held))
            return False
        start, end = min(found)
        if self._is_in_string(self._text[:start]):
            self._take_value(self._cut(start + 1))
            return True
        value = self._cut(start)
        self._take_value(value.removesuffix("\n") if on_own_lines else value)
        if end == ends[0]:
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

    def _finish_call(self) -> None:
        """The call was cut off, and so are its arguments."""
        if self._within is _Within.VALUE and not stays_text(self._types):
            self._add_arguments("".join(self._value).strip())
        self._held.clear()
