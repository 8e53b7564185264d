"""/v1/messages, Anthropic's API: answers."""

import msgspec
from msgspec import UNSET, Raw, UnsetType

from loraserve.serving.generation import TokenUsage

UNSIGNED = "unsigned"
"""Not empty, because some clients drop thinking blocks without a signature."""


class AnswerText(msgspec.Struct, frozen=True, tag="text"):
    text: str


class AnswerThinking(msgspec.Struct, frozen=True, tag="thinking"):
    """The model's reasoning before the answer; only on a server that separates it (--reasoning-parser)."""

    thinking: str
    signature: str
    """Always "unsigned": this server signs nothing."""


class AnswerToolUse(msgspec.Struct, frozen=True, tag="tool_use"):
    """A call of a tool."""

    id: str
    """The `tool_use_id` to send with the call's result."""
    name: str
    input: dict[str, Raw]
    """What the model wrote if that is a JSON object, else {"INVALID_JSON": <the text>}."""


AnswerBlock = AnswerText | AnswerThinking | AnswerToolUse


class OutputTokens(msgspec.Struct, frozen=True):
    thinking_tokens: int
    """Tokens of `output_tokens` that are thinking."""


class MessageUsage(msgspec.Struct, frozen=True):
    """The prompt has `input_tokens` + `cache_read_input_tokens` tokens."""

    input_tokens: int
    """Prompt tokens that were computed."""
    output_tokens: int
    """Tokens of the answer, thinking included."""
    cache_read_input_tokens: int
    """Prompt tokens found in the prefix cache."""
    cache_creation_input_tokens: int = 0
    """Always 0: writing to the cache is not billed."""
    output_tokens_details: OutputTokens | UnsetType = UNSET
    """Only on a server that separates reasoning (--reasoning-parser)."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag="message"):
    """An answer."""

    id: str
    role: str = "assistant"
    model: str
    """The model as the request named it."""
    content: list[AnswerBlock] = []
    stop_reason: str | None = None
    """ "end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence" or "tool_use"; null at the start of a
    stream."""
    stop_sequence: str | None = None
    """The stop sequence that ended the answer, if `stop_reason` is "stop_sequence"; else null."""
    usage: MessageUsage


class TokenCount(msgspec.Struct, frozen=True):
    input_tokens: int
    """Tokens of the whole prompt, cached or not."""


class ThreadRefusal(msgspec.Struct, frozen=True):
    """Makes Anthropic's clients send the request again with all messages so far instead of a `thread`."""

    error_code: str = "thread_unsupported_request"
    unsupported: tuple[str, ...] = ("thread",)


class MessageErrorDetail(msgspec.Struct, frozen=True):
    type: str
    message: str
    details: ThreadRefusal | UnsetType = UNSET
    """Only if `thread` was refused."""


class MessageError(msgspec.Struct, frozen=True, tag="error"):
    """An error in the format of Anthropic's API."""

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
