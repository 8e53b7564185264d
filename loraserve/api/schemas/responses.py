"""/v1/responses: requests."""

from typing import Any

import msgspec
from msgspec import Raw

from loraserve.api.schemas.sampling import SamplingFields
from loraserve.api.schemas.structured_outputs import JsonObjectFormat, TextFormat
from loraserve.api.schemas.unsupported import ABSENT


class InputPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    """Only "input_text" or, for the assistant, "output_text", "reasoning_text" or "summary_text"."""
    text: str | None = None
    annotations: Raw = ABSENT
    logprobs: Raw = ABSENT
    """As in answers; without effect."""
    prompt_cache_breakpoint: Raw = ABSENT
    """Without effect: prefixes are always cached."""


class InputItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message, a function call, a call's output, or an item of an earlier answer as it was returned."""

    type: str = "message"
    """ "message" (the default), "reasoning", "function_call" or "function_call_output"."""
    role: str | None = None
    """For a message: "user", "assistant", "system" or "developer"."""
    content: str | list[InputPart] | None = None
    """Of a message or of reasoning. The model's chat template decides whether the model sees reasoning."""
    summary: list[InputPart] | None = None
    """Of reasoning; used only if there is no `content`."""
    call_id: str | None = None
    """Connects a call and its output."""
    name: str | None = None
    """Name of the called function."""
    arguments: str | None = None
    """Of a call: a JSON object; "" means {}."""
    output: str | list[InputPart] | None = None
    """The result of a call."""
    id: str | None = None
    """As in answers; without effect."""
    status: str | None = None
    """As in answers; without effect."""
    caller: Raw = ABSENT
    encrypted_content: Raw = ABSENT
    namespace: Raw = ABSENT
    phase: Raw = ABSENT


class FunctionTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    type: str
    """Only "function"."""
    name: str
    description: str | None = None
    parameters: dict[str, Raw] | None = None
    """A JSON Schema of the arguments."""
    strict: bool | None = None
    """Without effect. If `tool_choice` is "required" or a function, arguments always follow the schema; if it is
    "auto", they are whatever the model writes."""
    defer_loading: Raw = ABSENT


class FunctionChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The function that the model must call."""

    type: str
    """Only "function"."""
    name: str


class SchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="json_schema"):
    name: str
    """Without effect."""
    schema: dict[str, Any]
    """A JSON Schema."""
    description: str | None = None
    """Without effect: the model does not see it."""
    strict: bool | None = None
    """Without effect: answers always follow the schema."""


class ResponseText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None
    """Constrains the answer to JSON or to a JSON schema. The model is not told about it: describe it in the
    instructions."""
    verbosity: Raw = ABSENT


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: str | None = None
    """ "none", "minimal", "low", "medium", "high", "xhigh" or "max". Needs a chat template that uses it. "none" also
    works with a template that uses `enable_thinking` instead, or that has no reasoning at all."""
    generate_summary: Raw = ABSENT
    summary: Raw = ABSENT


class ResponseStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None
    """Without effect: events are never padded."""


class ResponsesRequest(SamplingFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Field names and meanings as in OpenAI's API and vLLM's extensions of it."""

    input: str | list[InputItem]
    """A text, which is a user's message, or 1 to 4,096 items."""
    instructions: str | None = None
    """A system message before all others."""
    max_output_tokens: int | None = None
    """Most tokens of the answer, reasoning included; at least 1. Default: as in the model's generation_config, else the
    rest of the context."""
    stream_options: ResponseStreamOptions | None = None
    """Only with `stream`."""
    text: ResponseText | None = None
    tools: list[FunctionTool] | None = None
    """At most 128, with 256 KiB of names, descriptions and schemas in total."""
    tool_choice: str | FunctionChoice | None = None
    """ "auto" (the default), "none", "required" or a function. "auto" needs a server with --tool-call-parser;
    "required" and a function do not. With "none", the model is not shown the tools."""
    parallel_tool_calls: bool | None = None
    """False: at most one call; if the model writes several, the answer has only the first."""
    include: list[str] | None = None
    """Only "message.output_text.logprobs" and "reasoning.encrypted_content". The second has no effect, because
    reasoning is returned in plain text."""
    top_logprobs: int | None = None
    """Most likely alternatives to return for each token, 0 to 20; needs "message.output_text.logprobs" in `include`.
    Default: 0."""
    thinking_token_budget: int | None = None
    """Most tokens of reasoning, after which it ends and the answer begins; needs a server with --reasoning-parser. -1 =
    no limit, which is the default."""
    metadata: dict[str, str] | None = None
    """Returned in the answer: at most 16 pairs, with keys of at most 64 and values of at most 512 characters."""
    chat_template_kwargs: dict[str, Raw] | None = None
    """More variables of the model's chat template, such as {"enable_thinking": false}; at most 32, with 16 KiB of
    JSON."""
    reasoning: Reasoning | None = None

    client_metadata: dict[str, str] | None = None
    """Accepted without effect. Codex sends it."""

    background: Raw = ABSENT
    context_management: Raw = ABSENT
    conversation: Raw = ABSENT
    max_tool_calls: Raw = ABSENT
    moderation: Raw = ABSENT
    previous_response_id: Raw = ABSENT
    prompt: Raw = ABSENT
    prompt_cache_options: Raw = ABSENT
    prompt_cache_retention: Raw = ABSENT
    truncation: Raw = ABSENT
