"""/v1/messages, Anthropic's API: what is answered."""

import msgspec
from msgspec import UNSET, Raw, UnsetType

from loraserve.serving.generation import TokenUsage

UNSIGNED = "unsigned"
"""Not empty: some clients drop thinking without a signature."""


class AnswerText(msgspec.Struct, frozen=True, tag="text"):
    text: str


class AnswerThinking(msgspec.Struct, frozen=True, tag="thinking"):
    """What the model thought first, of a server that tells it apart (--reasoning-parser)."""

    thinking: str
    signature: str
    """Always "unsigned": nothing is signed."""


class AnswerToolUse(msgspec.Struct, frozen=True, tag="tool_use"):
    id: str
    """What the result of the call has to name."""
    name: str
    input: dict[str, Raw]
    """What the model wrote if that is a JSON object, else {"INVALID_JSON": what it wrote}."""


AnswerBlock = AnswerText | AnswerThinking | AnswerToolUse


class OutputTokens(msgspec.Struct, frozen=True):
    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True):
    """The prompt's tokens are `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: int
    """Of the prompt, those that were computed."""
    output_tokens: int
    cache_read_input_tokens: int
    """Of the prompt, those that were cached."""
    cache_creation_input_tokens: int = 0
    """Of a cache that is paid for, which there is not."""
    output_tokens_details: OutputTokens | UnsetType = UNSET
    """Where reasoning is told apart."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag="message"):
    id: str
    role: str = "assistant"
    model: str
    content: list[AnswerBlock] = []
    stop_reason: str | None = None
    """ "end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence" or "tool_use"; null where a stream
    begins."""
    stop_sequence: str | None = None
    """Which one, of "stop_sequence"."""
    usage: MessageUsage


class TokenCount(msgspec.Struct, frozen=True):
    input_tokens: int
    """Of the prompt, cached or not."""


class ThreadRefusal(msgspec.Struct, frozen=True):
    """After it, Anthropic's clients send the messages so far."""

    error_code: str = "thread_unsupported_request"
    unsupported: tuple[str, ...] = ("thread",)


class MessageErrorDetail(msgspec.Struct, frozen=True):
    type: str
    message: str
    details: ThreadRefusal | UnsetType = UNSET
    """Where `thread` is refused."""


class MessageError(msgspec.Struct, frozen=True, tag="error"):
    error: MessageErrorDetail
    request_id: str


def message_usage(usage: TokenUsage) -> MessageUsage:
    num_thinking = usage.num_reasoning_tokens
    return MessageUsage(
        input_tokens=usage.num_prompt_tokens - usage.num_cached_tokens,
        output_tokens=usage.num_completion_tokens,
        cache_read_input_tokens=usage.num_cached_tokens,
        output_tokens_details=UNSET if num_thinking is None else OutputTokens(num_thinking),
    )
