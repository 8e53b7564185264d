"""/v1/responses: what is answered."""

from typing import Any

import msgspec

from loraserve.api.schemas.chat import ContentLogprob
from loraserve.api.schemas.responses import FunctionChoice
from loraserve.serving.generation import TokenUsage

IN_PROGRESS, COMPLETED, INCOMPLETE, FAILED = "in_progress", "completed", "incomplete", "failed"


class OutputText(msgspec.Struct, frozen=True):
    text: str
    logprobs: list[ContentLogprob]
    """Only if asked for with `include`."""
    annotations: list[str] = []
    """None: the model has no sources."""
    type: str = "output_text"


class OutputMessage(msgspec.Struct, frozen=True, tag="message"):
    id: str
    status: str
    content: list[OutputText]
    role: str = "assistant"


class OutputCall(msgspec.Struct, frozen=True, tag="function_call"):
    id: str
    call_id: str
    """What the output of the call has to name."""
    name: str
    arguments: str
    """A JSON object, unless the model broke it off."""
    status: str


class ReasoningText(msgspec.Struct, frozen=True):
    text: str
    type: str = "reasoning_text"


class OutputReasoning(msgspec.Struct, frozen=True, tag="reasoning"):
    """What the model thought first, of a server that tells it apart (--reasoning-parser)."""

    id: str
    status: str
    content: list[ReasoningText]
    summary: list[str] = []
    """None: the reasoning itself is there."""


OutputItem = OutputMessage | OutputCall | OutputReasoning


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0
    """Of a cache that is paid for, which there is not."""


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0
    """0 where they are not told apart."""


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: str
    """ "max_output_tokens"."""


class ResponseFailure(msgspec.Struct, frozen=True):
    code: str
    message: str


class EchoedTool(msgspec.Struct, frozen=True):
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None
    type: str = "function"


class EchoedText(msgspec.Struct, frozen=True):
    format: dict[str, Any]


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing of it is kept: what goes on with it sends its `output` with the next request's `input`."""

    id: str
    object: str = "response"
    created_at: int
    status: str
    """ "in_progress" while it is streamed, then "completed", "incomplete" or "failed"."""
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None
    """Null while it is streamed."""
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float
    """That the answer was made with; 0 is greedy."""
    text: EchoedText
    tool_choice: str | FunctionChoice
    tools: list[EchoedTool]
    top_logprobs: int
    top_p: float
    background: bool = False
    previous_response_id: str | None = None
    store: bool = False
    truncation: str = "disabled"


def response_usage(usage: TokenUsage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.num_prompt_tokens,
        input_tokens_details=InputTokensDetails(usage.num_cached_tokens),
        output_tokens=usage.num_completion_tokens,
        output_tokens_details=OutputTokensDetails(usage.num_reasoning_tokens or 0),
        total_tokens=usage.num_prompt_tokens + usage.num_completion_tokens,
    )
