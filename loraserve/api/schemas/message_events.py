"""The events of a streamed message."""

import msgspec

from loraserve.api.schemas.message_answer import AnswerBlock, Message, MessageUsage


class MessageStart(msgspec.Struct, frozen=True, tag="message_start"):
    message: Message


class BlockStart(msgspec.Struct, frozen=True, tag="content_block_start"):
    index: int
    content_block: AnswerBlock


class TextPiece(msgspec.Struct, frozen=True, tag="text_delta"):
    text: str


class ThinkingPiece(msgspec.Struct, frozen=True, tag="thinking_delta"):
    thinking: str


class SignaturePiece(msgspec.Struct, frozen=True, tag="signature_delta"):
    signature: str


class InputPiece(msgspec.Struct, frozen=True, tag="input_json_delta"):
    partial_json: str


class BlockDelta(msgspec.Struct, frozen=True, tag="content_block_delta"):
    index: int
    delta: TextPiece | ThinkingPiece | SignaturePiece | InputPiece


class BlockStop(msgspec.Struct, frozen=True, tag="content_block_stop"):
    index: int


class StopDetails(msgspec.Struct, frozen=True):
    stop_reason: str
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, tag="message_delta"):
    delta: StopDetails
    usage: MessageUsage
    """Of the whole message."""


class MessageStop(msgspec.Struct, frozen=True, tag="message_stop"):
    pass


BlockEvent = BlockStart | BlockDelta | BlockStop
MessageEvent = MessageStart | BlockEvent | MessageDelta | MessageStop
