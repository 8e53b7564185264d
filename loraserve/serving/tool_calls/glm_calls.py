"""GLM's calls: `<tool_call>name<arg_key>name</arg_key><arg_value>text</arg_value>…</tool_call>`.

GLM-4.5 and 4.6 write line breaks between tags, GLM-4.7 none.
"""

import re
from collections.abc import Mapping
from typing import Any

from loraserve.serving.text.conversation import FUNCTION_NAME
from loraserve.serving.tool_calls.around import MAX_AROUND, State
from loraserve.serving.tool_calls.formats import CallSyntax
from loraserve.serving.tool_calls.tagged_calls import MAX_NAME, NAME, ParameterTags, TaggedCallParser

KEY, END_OF_KEY, VALUE = "<arg_key>", "</arg_key>", "<arg_value>"
TAG = re.compile(rf"{KEY}{NAME}{END_OF_KEY}\s{{0,{MAX_AROUND}}}{VALUE}")
END_OF_NAME = re.compile(r"[\n<]")


class GlmCallParser(TaggedCallParser):
    """See `CallParser`."""

    def __init__(self, syntax: CallSyntax, tools: Mapping[str, Any]) -> None:
        """tools: the schema of each function's parameters."""
        tags = ParameterTags(
            beginning=KEY,
            tag=TAG,
            may_become_tag=_may_become_tag,
            ends=("</arg_value>",),
            end_of_function=syntax.closing,
            on_own_lines=False,
        )
        super().__init__(syntax, tags, tools)

    def _read_head(self) -> bool:
        rest = self._text.lstrip()
        num_blank = len(self._text) - len(rest)
        end = END_OF_NAME.search(rest, 0, MAX_AROUND)
        if num_blank > MAX_AROUND:
            self._release()
        elif end is None and len(rest) < MAX_AROUND:
            return False
        elif end is None or not FUNCTION_NAME.fullmatch(name := rest[: end.start()].strip()):
            self._release()
        elif (is_call := self._is_call(rest[end.start() :])) is None:
            return False
        elif is_call:
            self._cut(num_blank + end.start())
            self._begin_call(name)
        else:
            self._release()
        return True

    def _is_call(self, rest: str) -> bool | None:
        """Whether what follows the name is a parameter or the closing; None = more text is needed."""
        marks, tag = (self._tags.beginning, self._tags.end_of_function), rest.lstrip()
        if len(rest) - len(tag) > MAX_AROUND:
            return False
        if tag.startswith(marks):
            return True
        return None if any(mark.startswith(tag) for mark in marks) else False

    def _end_function(self) -> None:
        """The closing is also the end of the function."""
        self._state = State.CLOSING


def _may_become_tag(text: str) -> bool:
    """Whether it begins a `TAG`, as far as it goes."""
    if not text.startswith(KEY):
        return False
    name, is_complete, rest = text[len(KEY) :].partition(END_OF_KEY)
    if is_complete:
        tag = rest.lstrip()
        is_near = len(rest) - len(tag) <= MAX_AROUND and VALUE.startswith(tag)
        return is_near and re.fullmatch(NAME, name) is not None
    begun = name[name.find("<") :] if "<" in name else ""
    return END_OF_KEY.startswith(begun) and "\n" not in name and len(name) < MAX_NAME + MAX_AROUND
