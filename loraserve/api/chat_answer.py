"""An answer that may call tools: its text read as content and tool calls."""

import secrets
import string
from collections.abc import Iterator
from typing import Protocol

from loraserve.api.forced_calls import calls_of
from loraserve.api.schemas.tools import CalledFunction, FunctionDelta, ResponseToolCall, ToolCallDelta
from loraserve.api.tools import FUNCTION, ToolUse
from loraserve.engine.request import FinishReason
from loraserve.serving.choice import ChoiceDelta
from loraserve.serving.tool_calls.formats import FoundCall, ToolCallFormat
from loraserve.serving.tool_calls.parser import ToolCallParser

ID_CHARS = string.ascii_letters + string.digits
NUM_ID_CHARS = 9
"""Mistral's templates refuse ids of another length."""
TOOL_CALLS = "tool_calls"
"""The finish reason."""


class ChatAnswer(Protocol):
    """Reads one choice, whose text may come in pieces."""

    num_calls: int

    def read(self, delta: ChoiceDelta) -> list[str | ResponseToolCall]:
        """The content and the calls that became certain, in order."""
        ...

    def finish_reason(self, reason: FinishReason) -> str: ...


def chat_answer(use: ToolUse) -> ChatAnswer | None:
    """None where nothing can be called: all that is said is content."""
    if use.schema is not None:
        return ForcedAnswer(use.named)
    return None if use.call_format is None else FreeAnswer(use.call_format, use.max_calls)


class ForcedAnswer:
    """All of it is calls, unless it was cut off."""

    def __init__(self, named: str | None) -> None:
        self._named = named
        self._text = ""
        self.num_calls = 0

    def read(self, delta: ChoiceDelta) -> list[str | ResponseToolCall]:
        """See `ChatAnswer.read`."""
        self._text += delta.text
        if delta.finish_reason is None:
            return []
        calls = calls_of(self._text, self._named)
        self.num_calls = len(calls)
        return [*map(_response_call, calls)] if calls else [self._text]

    def finish_reason(self, reason: FinishReason) -> str:
        """As in OpenAI's API, "stop" where the request named the function."""
        return TOOL_CALLS if self.num_calls and self._named is None and reason is FinishReason.STOP else reason


class FreeAnswer:
    """The model calls or talks, as it likes."""

    def __init__(self, call_format: ToolCallFormat, max_calls: int | None) -> None:
        self._parser = ToolCallParser(call_format)
        self._max_calls = max_calls
        self.num_calls = 0

    def read(self, delta: ChoiceDelta) -> list[str | ResponseToolCall]:
        """See `ChatAnswer.read`."""
        found = self._parser.feed(delta.text)
        if delta.finish_reason is not None:
            found += self._parser.finish()
        read: list[str | ResponseToolCall] = []
        for part in found:
            if isinstance(part, str):
                read.append(part)
            elif self._max_calls is None or self.num_calls < self._max_calls:
                self.num_calls += 1
                read.append(_response_call(part))
        return read

    def finish_reason(self, reason: FinishReason) -> str:
        """An answer that was cut off says so, whatever it called."""
        return TOOL_CALLS if self.num_calls and reason is FinishReason.STOP else reason


def call_deltas(first_index: int, calls: list[ResponseToolCall]) -> Iterator[ToolCallDelta]:
    """Two for each call: as in OpenAI's API the name comes first, then the arguments."""
    for index, call in enumerate(calls, first_index):
        yield ToolCallDelta(index, FunctionDelta(call.function.name, ""), call.id, call.type)
        yield ToolCallDelta(index, FunctionDelta(arguments=call.function.arguments))


def _response_call(call: FoundCall) -> ResponseToolCall:
    call_id = "".join(secrets.choice(ID_CHARS) for _ in range(NUM_ID_CHARS))
    return ResponseToolCall(call_id, FUNCTION, CalledFunction(call.name, call.arguments))
