"""/v1/chat/completions."""

import msgspec
from msgspec import UNSET, Raw, UnsetType

from loraserve.api.schemas.logprobs import PromptLogprobs
from loraserve.api.schemas.metrics import RequestMetrics
from loraserve.api.schemas.sampling import GenerationFields
from loraserve.api.schemas.tools import NamedToolChoice, RequestToolCall, ResponseToolCall, Tool, ToolCallDelta
from loraserve.api.schemas.unsupported import ABSENT
from loraserve.api.schemas.usage import Usage


class ContentPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Only text."""

    type: str
    text: str | None = None
    # Known so that these parts are refused by their type.
    audio_url: Raw = ABSENT
    file: Raw = ABSENT
    image_url: Raw = ABSENT
    input_audio: Raw = ABSENT
    refusal: Raw = ABSENT
    video_url: Raw = ABSENT


class RequestMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: str
    content: str | list[ContentPart] | None = None
    """May only be missing beside `tool_calls`."""
    name: str | None = None
    tool_calls: list[RequestToolCall] | None = None
    """Of role "assistant"."""
    tool_call_id: str | None = None
    """Of role "tool", whose content is the call's result."""
    reasoning_content: str | None = None
    """Of role "assistant", as answers have it. The model's template says whether the model is shown it."""
    reasoning: str | None = None
    """The same, by its other name."""
    # What assistants' messages carry when clients send them back.
    annotations: Raw = ABSENT
    audio: Raw = ABSENT
    function_call: Raw = ABSENT
    refusal: Raw = ABSENT
    # What clients add to an answer before they send it back: accepted, and without effect.
    parsed: Raw = ABSENT
    """By OpenAI's `parse` and `stream`."""
    provider_specific_fields: Raw = ABSENT
    """By LiteLLM."""


class Prediction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    """Only "content"."""
    content: str | list[ContentPart]


class ChatCompletionRequest(GenerationFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    messages: list[RequestMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """Go on writing the last message, which must be the assistant's."""
    chat_template_kwargs: dict[str, Raw] | None = None
    """More variables of the model's chat template, such as {"enable_thinking": false}."""
    tools: list[Tool] | None = None
    tool_choice: str | NamedToolChoice | None = None
    """By default "auto", which needs a server with --tool-call-parser; "required" and a function do not. With "none"
    the model is not shown the tools."""
    parallel_tool_calls: bool | None = None
    """False: one call at most; of several that the model writes, the first."""
    reasoning_effort: str | None = None
    """Where the model's chat template knows it; "none" where it knows `enable_thinking`, or nothing of reasoning."""
    include_reasoning: bool = True
    """False: reasoning is generated and counted, and left out of the answer; needs a server with --reasoning-parser."""
    prediction: Prediction | None = None
    """What the answer will be, more or less, such as the file that is to be edited. The answer is the same without it;
    where they agree it comes sooner."""

    audio: Raw = ABSENT
    best_of: int | None = None
    """Only equal to `n`."""
    chat_template: Raw = ABSENT
    documents: Raw = ABSENT
    echo: Raw = ABSENT
    function_call: Raw = ABSENT
    functions: Raw = ABSENT
    mm_processor_kwargs: Raw = ABSENT
    modalities: Raw = ABSENT
    moderation: Raw = ABSENT
    prompt_cache_retention: Raw = ABSENT
    verbosity: Raw = ABSENT
    web_search_options: Raw = ABSENT


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ContentLogprob]


class ResponseMessage(msgspec.Struct, frozen=True):
    role: str
    content: str | None
    """Null where there are only tool calls or reasoning."""
    refusal: None = None
    tool_calls: list[ResponseToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    """What the model thought first, of a server that tells it apart (--reasoning-parser)."""
    reasoning: str | UnsetType | None = UNSET
    """The same, for clients that know it by this name."""


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: ResponseMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionResponse(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    metrics: RequestMetrics | UnsetType = UNSET
    """Only if asked for with `include_metrics`."""


class ChatDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same."""


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """One entry of a stream chunk's `choices`."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
