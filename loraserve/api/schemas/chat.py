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
    """Only text is supported."""

    type: str
    """Only "text"."""
    text: str | None = None
    # Known so that these parts are refused by their type.
    audio_url: Raw = ABSENT
    file: Raw = ABSENT
    image_url: Raw = ABSENT
    input_audio: Raw = ABSENT
    refusal: Raw = ABSENT
    video_url: Raw = ABSENT
    # Requests that a prefix be cached.
    cache_control: Raw = ABSENT
    """Without effect: prefixes are always cached. Clients of several APIs keep it from Anthropic's."""
    prompt_cache_breakpoint: Raw = ABSENT
    """Without effect: prefixes are always cached."""


class RequestMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: str
    """ "system", "developer", "user", "assistant" or "tool"."""
    content: str | list[ContentPart] | None = None
    """Required, except for an assistant's message with `tool_calls` or reasoning."""
    name: str | None = None
    tool_calls: list[RequestToolCall] | None = None
    """Only for role "assistant"."""
    tool_call_id: str | None = None
    """Only for role "tool", whose content is the result of that call."""
    reasoning_content: str | None = None
    """Only for role "assistant": the reasoning of an earlier answer. The model's chat template decides whether the
    model sees it."""
    reasoning: str | None = None
    """Another name for `reasoning_content`."""
    # What assistants' messages carry when clients send them back.
    annotations: Raw = ABSENT
    audio: Raw = ABSENT
    function_call: Raw = ABSENT
    refusal: Raw = ABSENT
    # What clients add to an answer before they send it back: accepted, and without effect.
    parsed: Raw = ABSENT
    """Without effect. OpenAI's `parse` and `stream` add it to an answer."""
    provider_specific_fields: Raw = ABSENT
    """Without effect. LiteLLM adds it to an answer."""
    thinking_blocks: Raw = ABSENT
    """Without effect. LiteLLM adds it to an answer from Anthropic's API; `reasoning_content` has the same text."""
    cache_control: Raw = ABSENT
    """Without effect: prefixes are always cached."""


class Prediction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The expected text of an answer."""

    type: str
    """Only "content"."""
    content: str | list[ContentPart]


class ChatCompletionRequest(GenerationFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Field names and meanings as in OpenAI's API and vLLM's extensions of it."""

    messages: list[RequestMessage]
    """The conversation so far: 1 to 4,096 messages with at most 4,096 tool calls in total."""
    max_completion_tokens: int | None = None
    """Most tokens of an answer, reasoning included; at least 1. Default: as in the model's generation_config, else the
    rest of the context."""
    logprobs: bool | None = None
    """Return the log-probabilities of the answer's tokens. Default: false."""
    top_logprobs: int | None = None
    """Most likely alternatives to return for each token, 0 to 20; needs `logprobs`. Default: 0."""
    add_generation_prompt: bool = True
    """End the prompt with the start of an assistant's message. Default: true."""
    continue_final_message: bool = False
    """Continue the last message, which must be the assistant's; needs `add_generation_prompt`: false. Default:
    false."""
    chat_template_kwargs: dict[str, Raw] | None = None
    """More variables of the model's chat template, such as {"enable_thinking": false}; at most 32, with 16 KiB of
    JSON."""
    tools: list[Tool] | None = None
    """Functions that the model may call: at most 128, with 256 KiB of names, descriptions and schemas in total."""
    tool_choice: str | NamedToolChoice | None = None
    """ "auto" (the default), "none", "required" or a function. "auto" needs a server with --tool-call-parser;
    "required" and a function do not. With "none", the model is not shown the tools."""
    parallel_tool_calls: bool | None = None
    """False: at most one call; if the model writes several, the answer has only the first."""
    reasoning_effort: str | None = None
    """ "none", "minimal", "low", "medium", "high", "xhigh" or "max". Needs a chat template that uses it. "none" also
    works with a template that uses `enable_thinking` instead, or that has no reasoning at all."""
    include_reasoning: bool = True
    """False: reasoning is generated and counted but left out of the answer; needs a server with --reasoning-parser.
    Default: true."""
    thinking_token_budget: int | None = None
    """Most tokens of reasoning, after which it ends and the answer begins; needs a server with --reasoning-parser. -1 =
    no limit, which is the default."""
    prediction: Prediction | None = None
    """Approximately what the answer will be, such as the file that is to be edited. The answer stays the same, but
    arrives sooner where it agrees with the prediction."""

    audio: Raw = ABSENT
    best_of: int | None = None
    """Only a value equal to `n` is accepted."""
    chat_template: Raw = ABSENT
    documents: Raw = ABSENT
    echo: Raw = ABSENT
    function_call: Raw = ABSENT
    functions: Raw = ABSENT
    mm_processor_kwargs: Raw = ABSENT
    modalities: Raw = ABSENT
    moderation: Raw = ABSENT
    prompt_cache_options: Raw = ABSENT
    prompt_cache_retention: Raw = ABSENT
    verbosity: Raw = ABSENT
    web_search_options: Raw = ABSENT


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    """The token's bytes, possibly only a part of a UTF-8 character."""


class ContentLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    """The token's bytes, possibly only a part of a UTF-8 character."""
    top_logprobs: list[TopLogprob]
    """The most likely tokens at this position, as many as `top_logprobs`."""


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ContentLogprob]


class ResponseMessage(msgspec.Struct, frozen=True):
    role: str
    """ "assistant"."""
    content: str | None
    """Null if the answer consists of tool calls or reasoning only."""
    refusal: None = None
    tool_calls: list[ResponseToolCall] | UnsetType = UNSET
    """Absent if nothing is called."""
    reasoning_content: str | UnsetType | None = UNSET
    """The model's reasoning before the answer; only on a server that separates it (--reasoning-parser)."""
    reasoning: str | UnsetType | None = UNSET
    """The same text under the name that other clients read."""


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: ResponseMessage
    logprobs: ChatLogprobs | None
    """Null without `logprobs`."""
    finish_reason: str | None
    """ "stop", "length", "tool_calls" or "abort"."""
    stop_reason: str | int | None
    """The stop string or stop token id that ended the answer; null otherwise."""
    token_ids: list[int] | UnsetType = UNSET
    """Only with `return_token_ids`."""


class ChatCompletionResponse(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    """Unix seconds."""
    model: str
    """The model as the request named it."""
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    """Only with `prompt_logprobs`."""
    prompt_token_ids: list[int] | UnsetType = UNSET
    """Only with `return_token_ids`."""
    metrics: RequestMetrics | UnsetType = UNSET
    """Only with `include_metrics`."""


class ChatDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same as `reasoning_content`."""


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """One entry of a stream chunk's `choices`."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
