"""Qwen's calls: `<tool_call><function=name><parameter=name>text</parameter>…</function></tool_call>`."""

import re
from collections.abc import Mapping
from typing import Any

from loraserve.serving.text.conversation import FUNCTION_NAME
from loraserve.serving.tool_calls.around import MAX_AROUND, State
from loraserve.serving.tool_calls.formats import CallSyntax
from loraserve.serving.tool_calls.tagged_calls import MAX_NAME, NAME, ParameterTags, TaggedCallParser

FUNCTION, END_OF_FUNCTION = "<function=", "</function>"


class QwenCallParser(TaggedCallParser):
    """See `CallParser`."""

    def __init__(self, syntax: CallSyntax, tools: Mapping[str, Any]) -> None:
        """tools: the schema of each function's parameters."""
        tags = ParameterTags(
            beginning="<parameter=",
            tag=re.compile(f"<parameter={NAME}>"),
            may_become_tag=re.compile(rf"<parameter=[^<>\n]{{0,{MAX_NAME}}}").fullmatch,
            ends=("</parameter>", f"{END_OF_FUNCTION}\n{syntax.closing}"),
            end_of_function=END_OF_FUNCTION,
            on_own_lines=True,
        )
        super().__init__(syntax, tags, tools)

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

    def _read_closing(self) -> bool:
        """Another function may follow instead."""
        rest = self._text.lstrip()
        if rest.startswith(FUNCTION):
            self._state = State.HEAD
            return True
        return not FUNCTION.startswith(rest) and super()._read_closing()
