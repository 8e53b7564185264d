"""Reads an answer that may call tools as content and tool calls."""

import secrets
import string
from collections.abc import Sequence
from typing import Protocol

from loraserve.api.chat.tools import FUNCTION, ToolUse
from loraserve.api.schemas.tools import CalledFunction, FunctionDelta, ResponseToolCall, ToolCallDelta
from loraserve.engine.request import FinishReason
from loraserve.serving.text.choice import ChoiceDelta
from loraserve.serving.text.found import CallArguments, CallBegun
from loraserve.serving.tool_calls.around import CallParser
from loraserve.serving.tool_calls.formats import LIST_OF_CALLS, ToolCallFormat
from loraserve.serving.tool_calls.json_calls import JsonCallParser
from loraserve.serving.tool_calls.json_extent import Extent, JsonExtent
from loraserve.serving.tool_calls.parser import call_parser

ID_CHARS = string.ascii_letters + string.digits
NUM_ID_CHARS = 9
"""Mistral's templates reject ids of any other length."""
TOOL_CALLS = "tool_calls"
"""A finish reason."""


class ChatAnswer(Protocol):
    """Reads one choice, whose text may arrive in pieces."""

    num_calls: int
    is_cut_off: bool
    """Set at the end: whether the answer ended within the arguments of a reported call, for whatever reason."""

    def read(self, delta: ChoiceDelta) -> list[str | ToolCallDelta]:
        """Content and parts of calls that became certain, in order."""
        ...

    def finish_reason(self, reason: FinishReason) -> str: ...


def chat_answer(use: ToolUse) -> ChatAnswer | None:
    """None if nothing can be called: the whole answer is content."""
    if use.syntax is not None and use.call_format is not None:
        parser = call_parser(use.call_format, use.tools)
        return WrittenCalls(parser, use.max_calls, must_call=True, is_named=use.named is not None)
    if use.named is not None:
        return NamedCall(use.named)
    if use.schema is not None:
        return WrittenCalls(JsonCallParser(LIST_OF_CALLS), use.max_calls, must_call=True)
    if use.call_format is ToolCallFormat.OPENAI:
        return AddressedCalls(use.max_calls)
    if use.call_format is None:
        return None
    return WrittenCalls(call_parser(use.call_format, use.tools), use.max_calls)


class AddressedCalls:
    """Calls that `ChoiceDelta.calls` already separates from the text."""

    def __init__(self, max_calls: int | None) -> None:
        self._max_calls = max_calls
        self._arguments = JsonExtent()
        """Of the latest call."""
        self._is_left_out = False
        self.num_calls = 0
        self.is_cut_off = False

    def read(self, delta: ChoiceDelta) -> list[str | ToolCallDelta]:
        """See `ChatAnswer.read`."""
        read: list[str | ToolCallDelta] = [delta.text] if delta.text else []
        for part in delta.calls:
            match part:
                case CallBegun(name):
                    self._is_left_out = self._max_calls is not None and self.num_calls >= self._max_calls
                    self._arguments = JsonExtent()
                    if not self._is_left_out:
                        read.append(_begun(self.num_calls, name))
                        self.num_calls += 1
                case CallArguments(text):
                    self._arguments.feed(text)
                    if not self._is_left_out:
                        read.append(_arguments(self.num_calls - 1, text))
        if delta.finish_reason is not None and self.num_calls and not self._is_left_out:
            self.is_cut_off = _is_cut_off(self._arguments.state, delta)
        return read

    def finish_reason(self, reason: FinishReason) -> str:
        """See `WrittenCalls.finish_reason`."""
        is_called = self.num_calls and not self.is_cut_off
        return TOOL_CALLS if is_called and reason is FinishReason.STOP else reason


class NamedCall:
    """The whole answer is the arguments of one function, which the request named."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._arguments = JsonExtent()
        self.num_calls = 0
        self.is_cut_off = False

    def read(self, delta: ChoiceDelta) -> list[str | ToolCallDelta]:
        """See `ChatAnswer.read`."""
        read: list[str | ToolCallDelta] = []
        if delta.text:
            self._arguments.feed(delta.text)
            read = [_arguments(0, delta.text)] if self.num_calls else [_begun(0, self._name), _arguments(0, delta.text)]
            self.num_calls = 1
        if delta.finish_reason is not None:
            self.is_cut_off = bool(self.num_calls) and _is_cut_off(self._arguments.state, delta)
        return read

    def finish_reason(self, reason: FinishReason) -> str:
        """As in OpenAI's API, "stop" rather than "tool_calls", because the request named the function."""
        return reason


class WrittenCalls:
    """Calls within the text that the model writes, either by its own choice or because it must."""

    def __init__(
        self, parser: CallParser, max_calls: int | None, *, must_call: bool = False, is_named: bool = False
    ) -> None:
        """must_call: unparsed text at the end is the beginning of a call, not content. is_named: the request named the
        function."""
        self._parser = parser
        self._max_calls = max_calls
        self._must_call = must_call
        self._is_named = is_named
        self._is_left_out = False
        self.num_calls = 0
        self.is_cut_off = False

    def read(self, delta: ChoiceDelta) -> list[str | ToolCallDelta]:
        """See `ChatAnswer.read`."""
        found = self._parser.feed(delta.text)
        arguments = self._parser.arguments
        if delta.finish_reason is not None:
            found += [part for part in self._parser.finish() if not (self._must_call and isinstance(part, str))]
        read: list[str | ToolCallDelta] = []
        for part in found:
            match part:
                case str():
                    read.append(part)
                case CallBegun(name):
                    self._is_left_out = self._max_calls is not None and self.num_calls >= self._max_calls
                    if not self._is_left_out:
                        read.append(_begun(self.num_calls, name))
                        self.num_calls += 1
                case CallArguments(text):
                    if not self._is_left_out:
                        read.append(_arguments(self.num_calls - 1, text))
        if delta.finish_reason is not None:
            self.is_cut_off = not self._is_left_out and _is_cut_off(arguments, delta)
        return read

    def finish_reason(self, reason: FinishReason) -> str:
        """If the last call was cut off, even by a stop string, `reason` stays, though earlier calls may be complete. If
        the function was named, see `NamedCall`."""
        is_called = self.num_calls and not self.is_cut_off and not self._is_named
        return TOOL_CALLS if is_called and reason is FinishReason.STOP else reason


def joined_calls(parts: Sequence[ToolCallDelta]) -> list[ResponseToolCall]:
    """The calls of a complete answer, from all its parts."""
    calls: list[tuple[ToolCallDelta, list[str]]] = []
    for part in parts:
        if part.id is not None:
            calls.append((part, []))
        calls[-1][1].append(part.function.arguments or "")
    return [
        ResponseToolCall(begun.id or "", FUNCTION, CalledFunction(begun.function.name or "", "".join(arguments)))
        for begun, arguments in calls
    ]


def _is_cut_off(arguments: Extent | None, delta: ChoiceDelta) -> bool:
    """Arguments that are not JSON end where the model ends; they are cut off if a limit or a stop string came first."""
    is_stopped = delta.finish_reason is FinishReason.LENGTH or isinstance(delta.stop_reason, str)
    return arguments is Extent.OPEN or (arguments is Extent.BROKEN and is_stopped)


def _begun(index: int, name: str) -> ToolCallDelta:
    call_id = "".join(secrets.choice(ID_CHARS) for _ in range(NUM_ID_CHARS))
    return ToolCallDelta(index, FunctionDelta(name, ""), call_id, FUNCTION)


def _arguments(index: int, text: str) -> ToolCallDelta:
    return ToolCallDelta(index, FunctionDelta(arguments=text))
