"""Builds a response's output items and emits an event for each step."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from loraserve.api.chat.answer import chat_answer
from loraserve.api.chat.tools import ToolUse
from loraserve.api.http.errors import cut_short
from loraserve.api.inference.content_logprobs import content_logprobs
from loraserve.api.inference.token_names import TokenNames
from loraserve.api.schemas.chat import ContentLogprob
from loraserve.api.schemas.response_answer import (
    COMPLETED,
    IN_PROGRESS,
    INCOMPLETE,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
)
from loraserve.api.schemas.response_events import (
    ArgumentsDelta,
    ArgumentsDone,
    ItemEvent,
    PartEvent,
    ReasoningDelta,
    ReasoningDone,
    ResponseEvent,
    TextDelta,
    TextDone,
)
from loraserve.api.schemas.tools import ToolCallDelta
from loraserve.engine.request import FinishReason
from loraserve.serving.text.choice import ChoiceDelta

CONTENT_INDEX = 0
"""Messages and reasoning have a single part."""


@dataclass(slots=True)
class _OpenMessage:
    id: str
    pieces: list[str] = field(default_factory=list)
    logprobs: list[ContentLogprob] = field(default_factory=list)


@dataclass(slots=True)
class _OpenReasoning:
    id: str
    pieces: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _OpenCall:
    id: str
    call_id: str
    name: str
    pieces: list[str] = field(default_factory=list)


class ResponseOutput:
    def __init__(self, request_id: str, use: ToolUse, names: TokenNames, top_logprobs: int | None) -> None:
        """top_logprobs: None = no logprobs, as always if tools may be called or reasoning is separated."""
        self.items: list[OutputItem] = []
        """The complete ones."""
        self.is_cut_off = False
        """Set at the end: whether the answer ended at its limit or within a call."""
        self._request_id = request_id
        self._answer = chat_answer(use)
        self._names = names
        self._top_logprobs = top_logprobs
        self._open: _OpenMessage | _OpenReasoning | _OpenCall | None = None

    def feed(self, delta: ChoiceDelta) -> Iterator[ResponseEvent]:
        """The caller must exhaust it. Raises `ServingError` if the answer was cut short."""
        if delta.finish_reason not in (None, FinishReason.STOP, FinishReason.LENGTH):
            raise cut_short()
        if delta.reasoning:
            yield from self._emit_reasoning(delta.reasoning)
        logprobs = self._logprobs(delta)
        for part in [delta.text] if self._answer is None else self._answer.read(delta):
            if not isinstance(part, str):
                yield from self._call(part)
            elif part or logprobs:  # Some tokens have no text, but logprobs.
                yield from self._emit_text(part, logprobs)
        if delta.finish_reason is not None:
            yield from self._finish(delta.finish_reason)

    def _finish(self, reason: FinishReason) -> Iterator[ResponseEvent]:
        """An empty answer becomes an empty message."""
        if not self.items and self._open is None:
            yield from self._emit_text("", [])
        is_call_cut_off = self._answer is not None and self._answer.is_cut_off
        self.is_cut_off = reason is FinishReason.LENGTH or is_call_cut_off
        is_incomplete = is_call_cut_off if isinstance(self._open, _OpenCall) else self.is_cut_off
        yield from self._close(INCOMPLETE if is_incomplete else COMPLETED)

    def _logprobs(self, delta: ChoiceDelta) -> list[ContentLogprob]:
        count = self._top_logprobs
        return [] if count is None else content_logprobs(self._names, delta.logprobs, count)

    def _emit_reasoning(self, text: str) -> Iterator[ResponseEvent]:
        if not isinstance(self._open, _OpenReasoning):
            yield from self._close(COMPLETED)
        index = len(self.items)
        if self._open is None:
            self._open = _OpenReasoning(f"rs_{self._request_id}_{index}")
            begun = OutputReasoning(self._open.id, IN_PROGRESS, [])
            yield ItemEvent("response.output_item.added", index, begun)
            yield PartEvent("response.content_part.added", index, begun.id, CONTENT_INDEX, ReasoningText(""))
        reasoning = self._open
        assert isinstance(reasoning, _OpenReasoning)
        reasoning.pieces.append(text)
        yield ReasoningDelta("response.reasoning_text.delta", index, reasoning.id, CONTENT_INDEX, text)

    def _emit_text(self, text: str, logprobs: list[ContentLogprob]) -> Iterator[ResponseEvent]:
        if not isinstance(self._open, _OpenMessage):
            yield from self._close(COMPLETED)
            yield from self._begin_message()
        index, message = len(self.items), self._open
        assert isinstance(message, _OpenMessage)
        message.pieces.append(text)
        message.logprobs += logprobs
        yield TextDelta("response.output_text.delta", index, message.id, CONTENT_INDEX, text, logprobs)

    def _begin_message(self) -> Iterator[ResponseEvent]:
        index = len(self.items)
        self._open = message = _OpenMessage(f"msg_{self._request_id}_{index}")
        yield ItemEvent("response.output_item.added", index, OutputMessage(message.id, IN_PROGRESS, []))
        part = OutputText("", [])
        yield PartEvent("response.content_part.added", index, message.id, CONTENT_INDEX, part)

    def _call(self, part: ToolCallDelta) -> Iterator[ResponseEvent]:
        if part.id is not None:
            yield from self._close(COMPLETED)
            index = len(self.items)
            self._open = call = _OpenCall(f"fc_{self._request_id}_{index}", part.id, part.function.name or "")
            begun = OutputCall(call.id, call.call_id, call.name, "", IN_PROGRESS)
            yield ItemEvent("response.output_item.added", index, begun)
        elif arguments := part.function.arguments:
            index, call = len(self.items), self._open
            assert isinstance(call, _OpenCall)
            call.pieces.append(arguments)
            yield ArgumentsDelta("response.function_call_arguments.delta", index, call.id, arguments)

    def _close(self, status: str) -> Iterator[ResponseEvent]:
        """Closes the open item, if there is one."""
        index, is_open = len(self.items), self._open
        self._open = None
        match is_open:
            case None:
                return
            case _OpenMessage(item_id, pieces, logprobs):
                part = OutputText("".join(pieces), logprobs)
                yield TextDone("response.output_text.done", index, item_id, CONTENT_INDEX, part.text, part.logprobs)
                yield PartEvent("response.content_part.done", index, item_id, CONTENT_INDEX, part)
                self.items.append(OutputMessage(item_id, status, [part]))
            case _OpenReasoning(item_id, pieces):
                thought = ReasoningText("".join(pieces))
                yield ReasoningDone("response.reasoning_text.done", index, item_id, CONTENT_INDEX, thought.text)
                yield PartEvent("response.content_part.done", index, item_id, CONTENT_INDEX, thought)
                self.items.append(OutputReasoning(item_id, status, [thought]))
            case _OpenCall(item_id, call_id, name, pieces):
                arguments = "".join(pieces)
                yield ArgumentsDone("response.function_call_arguments.done", index, item_id, name, arguments)
                self.items.append(OutputCall(item_id, call_id, name, arguments, status))
        yield ItemEvent("response.output_item.done", index, self.items[index])
