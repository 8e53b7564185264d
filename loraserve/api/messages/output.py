"""Builds a message's blocks and emits events for each step."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
from msgspec import Raw

from loraserve.api.chat.answer import ChatAnswer, chat_answer
from loraserve.api.chat.conversations import JSON_OBJECT
from loraserve.api.chat.tools import ToolUse
from loraserve.api.http.errors import cut_short
from loraserve.api.http.nesting import nesting_depth
from loraserve.api.messages.input import CALL_ID_PREFIX
from loraserve.api.schemas.message_answer import UNSIGNED, AnswerBlock, AnswerText, AnswerThinking, AnswerToolUse
from loraserve.api.schemas.message_events import (
    BlockDelta,
    BlockEvent,
    BlockStart,
    BlockStop,
    InputPiece,
    SignaturePiece,
    StopDetails,
    TextPiece,
    ThinkingPiece,
)
from loraserve.api.schemas.tools import ToolCallDelta
from loraserve.engine.request import FinishReason
from loraserve.serving.text.choice import ChoiceDelta

END_TURN, STOP_SEQUENCE, TOOL_USE = "end_turn", "stop_sequence", "tool_use"
MAX_TOKENS, CONTEXT_EXCEEDED = "max_tokens", "model_context_window_exceeded"
INVALID_JSON = "INVALID_JSON"
"""The only member of a call's input if the model wrote no JSON object. Named as in Anthropic's documentation."""
DEPTH_OF_INPUT = 5
"""Nesting depth of a call's input in the body of a request that sends it back."""


@dataclass(slots=True)
class _OpenText:
    pieces: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _OpenThinking:
    pieces: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _OpenCall:
    id: str
    name: str
    is_eager: bool
    pieces: list[str] = field(default_factory=list)


class MessageOutput:
    """Sends a call's input once it is complete: anything but a JSON object would break clients, and partial input must
    not be mistaken for complete input. For eager tools, clients request it as it is written."""

    def __init__(self, use: ToolUse, eager_tools: frozenset[str], max_json_depth: int, *, fills_context: bool) -> None:
        """max_json_depth: limit of request bodies. fills_context: whether the model's context limits the answer."""
        self.blocks: list[AnswerBlock] = []
        """The complete ones."""
        self.stop: StopDetails | None = None
        """Set at the end."""
        self._answer = chat_answer(use)
        self._eager_tools = eager_tools
        self._max_input_depth = max_json_depth - DEPTH_OF_INPUT
        self._fills_context = fills_context
        self._open: _OpenText | _OpenThinking | _OpenCall | None = None

    def feed(self, delta: ChoiceDelta) -> Iterator[BlockEvent]:
        """The caller must exhaust it. Raises `ServingError` if the answer was cut short."""
        if delta.finish_reason not in (None, FinishReason.STOP, FinishReason.LENGTH):
            raise cut_short()
        if delta.reasoning:
            yield from self._emit_reasoning(delta.reasoning)
        for part in [delta.text] if self._answer is None else self._answer.read(delta):
            if not isinstance(part, str):
                yield from self._call(part)
            elif part:
                yield from self._emit_text(part)
        if delta.finish_reason is not None:
            yield from self._close()
            self.stop = self._stop_details(delta, delta.finish_reason)

    def _emit_reasoning(self, text: str) -> Iterator[BlockEvent]:
        if not isinstance(self._open, _OpenThinking):
            yield from self._begin(_OpenThinking(), AnswerThinking("", ""))
        yield self._piece(text, ThinkingPiece(text))

    def _emit_text(self, text: str) -> Iterator[BlockEvent]:
        if not isinstance(self._open, _OpenText):
            yield from self._begin(_OpenText(), AnswerText(""))
        yield self._piece(text, TextPiece(text))

    def _call(self, part: ToolCallDelta) -> Iterator[BlockEvent]:
        arguments = part.function.arguments
        if part.id is not None:
            name = part.function.name or ""
            call = _OpenCall(CALL_ID_PREFIX + part.id, name, name in self._eager_tools)
            yield from self._begin(call, AnswerToolUse(call.id, name, {}))
        elif arguments:
            assert isinstance(self._open, _OpenCall)
            if self._open.is_eager:
                yield self._piece(arguments, InputPiece(arguments))
            else:
                self._open.pieces.append(arguments)

    def _begin(self, block: _OpenText | _OpenThinking | _OpenCall, begun: AnswerBlock) -> Iterator[BlockEvent]:
        yield from self._close()
        self._open = block
        yield BlockStart(len(self.blocks), begun)

    def _piece(self, text: str, piece: TextPiece | ThinkingPiece | InputPiece) -> BlockDelta:
        assert self._open is not None
        self._open.pieces.append(text)
        return BlockDelta(len(self.blocks), piece)

    def _close(self) -> Iterator[BlockEvent]:
        """Closes the open block, if there is one."""
        index, is_open = len(self.blocks), self._open
        self._open = None
        match is_open:
            case None:
                return
            case _OpenText(pieces):
                self.blocks.append(AnswerText("".join(pieces)))
            case _OpenThinking(pieces):
                yield BlockDelta(index, SignaturePiece(UNSIGNED))
                self.blocks.append(AnswerThinking("".join(pieces), UNSIGNED))
            case _OpenCall(call_id, name, is_eager, pieces):
                given = _input("".join(pieces), self._max_input_depth)
                if not is_eager:
                    yield BlockDelta(index, InputPiece(msgspec.json.encode(given).decode()))
                self.blocks.append(AnswerToolUse(call_id, name, given))
        yield BlockStop(index)

    def _stop_details(self, delta: ChoiceDelta, reason: FinishReason) -> StopDetails:
        if reason is FinishReason.LENGTH:
            return StopDetails(CONTEXT_EXCEEDED if self._fills_context else MAX_TOKENS, None)
        if _has_called(self._answer):
            return StopDetails(TOOL_USE, None)
        if isinstance(delta.stop_reason, str):
            return StopDetails(STOP_SEQUENCE, delta.stop_reason)
        return StopDetails(END_TURN, None)


def _has_called(answer: ChatAnswer | None) -> bool:
    return answer is not None and answer.num_calls > 0 and not answer.is_cut_off


def _input(written: str, max_depth: int) -> dict[str, Raw]:
    """As written, if a later request can send it back: an agent whose conversation is refused from then on is stuck."""
    try:
        if nesting_depth(written.encode(), max_depth) <= max_depth:
            msgspec.json.decode(written or "{}")  # Also decodes what `Raw` skips, such as 1e999.
            return JSON_OBJECT.decode(written or "{}")
    except (msgspec.DecodeError, RecursionError):
        pass
    return {INVALID_JSON: Raw(msgspec.json.encode(written))}
