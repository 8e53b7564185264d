"""/v1/responses: answers."""

from typing import Any

import msgspec

from loraserve.api.schemas.chat import ContentLogprob
from loraserve.api.schemas.responses import FunctionChoice
from loraserve.serving.generation import TokenUsage

IN_PROGRESS, COMPLETED, INCOMPLETE, FAILED = "in_progress", "completed", "incomplete", "failed"


class OutputText(msgspec.Struct, frozen=True):
    text: str
    logprobs: list[ContentLogprob]
    """Empty unless `include` has "message.output_text.logprobs"."""
    annotations: list[str] = []
    """Always empty: the model cites no sources."""
    type: str = "output_text"


class OutputMessage(msgspec.Struct, frozen=True, tag="message"):
    id: str
    status: str
    """ "in_progress", "completed" or "incomplete"."""
    content: list[OutputText]
    role: str = "assistant"


class OutputCall(msgspec.Struct, frozen=True, tag="function_call"):
    """A call of a function."""

    id: str
    call_id: str
    """The `call_id` to send with the call's output."""
    name: str
    arguments: str
    """A JSON object, unless the model stopped in the middle of it."""
    status: str


class ReasoningText(msgspec.Struct, frozen=True):
    text: str
    type: str = "reasoning_text"


class OutputReasoning(msgspec.Struct, frozen=True, tag="reasoning"):
    """The model's reasoning before the answer; only on a server that separates it (--reasoning-parser)."""

    id: str
    status: str
    content: list[ReasoningText]
    summary: list[str] = []
    """Always empty: the reasoning itself is in `content`."""


OutputItem = OutputMessage | OutputCall | OutputReasoning


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    cache_write_tokens: int = 0
    """Always 0: writing to the cache is not billed."""


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0
    """0 if the server does not separate reasoning."""


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: str
    """Always "max_output_tokens"."""


class ResponseFailure(msgspec.Struct, frozen=True):
    code: str
    message: str


class EchoedTool(msgspec.Struct, frozen=True):
    """A tool as the request sent it."""

    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None
    type: str = "function"


class EchoedText(msgspec.Struct, frozen=True):
    format: dict[str, Any]


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """An answer. It is not stored: to continue, send its `output` items in the next request's `input`."""

    id: str
    object: str = "response"
    created_at: int
    """Unix seconds."""
    status: str
    """ "in_progress" during a stream; finally "completed", "incomplete" or "failed"."""
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    """The model as the request named it."""
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None
    """Null until a stream ends."""
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float
    """The temperature in use; 0 = greedy."""
    text: EchoedText
    tool_choice: str | FunctionChoice
    tools: list[EchoedTool]
    top_logprobs: int
    top_p: float
    """The value in use."""
    background: bool = False
    previous_response_id: str | None = None
    store: bool = False
    truncation: str = "disabled"


class InputTokenCount(msgspec.Struct, frozen=True):
    input_tokens: int
    """Tokens of the whole prompt, cached or not."""
    object: str = "response.input_tokens"


def response_usage(usage: TokenUsage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.num_prompt_tokens,
        input_tokens_details=InputTokensDetails(usage.num_cached_tokens),
        output_tokens=usage.num_completion_tokens,
        output_tokens_details=OutputTokensDetails(usage.num_reasoning_tokens or 0),
        total_tokens=usage.num_prompt_tokens + usage.num_completion_tokens,
    )
