"""The events of a streamed response, without their `sequence_number`, which the encoder adds."""

import msgspec

from loraserve.api.schemas.chat import ContentLogprob
from loraserve.api.schemas.response_answer import OutputItem, OutputText, ReasoningText, ResponseObject


class ResponseEvent(msgspec.Struct, frozen=True):
    type: str


class LifecycleEvent(ResponseEvent, frozen=True):
    """response.created, .in_progress, .completed, .incomplete and .failed."""

    response: ResponseObject


class ItemEvent(ResponseEvent, frozen=True):
    """response.output_item.added and .done."""

    output_index: int
    item: OutputItem


class PartEvent(ResponseEvent, frozen=True):
    """response.content_part.added and .done."""

    output_index: int
    item_id: str
    content_index: int
    part: OutputText | ReasoningText


class TextDelta(ResponseEvent, frozen=True):
    """response.output_text.delta."""

    output_index: int
    item_id: str
    content_index: int
    delta: str
    logprobs: list[ContentLogprob]


class TextDone(ResponseEvent, frozen=True):
    """response.output_text.done."""

    output_index: int
    item_id: str
    content_index: int
    text: str
    logprobs: list[ContentLogprob]


class ReasoningDelta(ResponseEvent, frozen=True):
    """response.reasoning_text.delta."""

    output_index: int
    item_id: str
    content_index: int
    delta: str


class ReasoningDone(ResponseEvent, frozen=True):
    """response.reasoning_text.done."""

    output_index: int
    item_id: str
    content_index: int
    text: str


class ArgumentsDelta(ResponseEvent, frozen=True):
    """response.function_call_arguments.delta."""

    output_index: int
    item_id: str
    delta: str


class ArgumentsDone(ResponseEvent, frozen=True):
    """response.function_call_arguments.done."""

    output_index: int
    item_id: str
    name: str
    arguments: str


class ErrorEvent(ResponseEvent, frozen=True):
    code: str
    message: str
    param: str | None
