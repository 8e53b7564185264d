"""/v1/responses: what is asked."""

from typing import Any

import msgspec
from msgspec import Raw

from loraserve.api.schemas.sampling import SamplingFields
from loraserve.api.schemas.structured_outputs import JsonObjectFormat, TextFormat
from loraserve.api.schemas.unsupported import ABSENT


class InputPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    """Only "input_text" and, of the assistant, "output_text", "reasoning_text" and "summary_text"."""
    text: str | None = None
    annotations: Raw = ABSENT
    logprobs: Raw = ABSENT
    """As answers have them; without effect."""


class InputItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message, a function's call or what it gave; of earlier answers, their items as they came."""

    type: str = "message"
    """ "message", "reasoning", "function_call" or "function_call_output"."""
    role: str | None = None
    """Of a message: "user", "assistant", "system" or "developer"."""
    content: str | list[InputPart] | None = None
    """Of a message, or of reasoning; whether the model is shown that, its template says."""
    summary: list[InputPart] | None = None
    """Of reasoning; without effect beside its content."""
    call_id: str | None = None
    """Of a call and of its output."""
    name: str | None = None
    """Of the function that is called."""
    arguments: str | None = None
    """Of a call: a JSON object; "" is an empty one."""
    output: str | list[InputPart] | None = None
    """Of a call."""
    id: str | None = None
    """As answers have it; without effect."""
    status: str | None = None
    """As answers have it; without effect."""
    caller: Raw = ABSENT
    encrypted_content: Raw = ABSENT
    namespace: Raw = ABSENT
    phase: Raw = ABSENT


class FunctionTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    """Only "function"."""
    name: str
    description: str | None = None
    parameters: dict[str, Raw] | None = None
    """A JSON Schema."""
    strict: bool | None = None
    """Without effect: arguments always follow the schema where `tool_choice` is "required" or a function, and are what
    the model writes where it is "auto"."""
    defer_loading: Raw = ABSENT


class FunctionChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    """Only "function"."""
    name: str


class SchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="json_schema"):
    name: str
    """Without effect."""
    schema: dict[str, Any]
    description: str | None = None
    """Without effect: the model is not shown it."""
    strict: bool | None = None
    """Without effect: answers always follow the schema."""


class ResponseText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None
    """Holds the answer to JSON, or to a JSON schema. It does not say so to the model: the instructions should."""
    verbosity: Raw = ABSENT


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: str | None = None
    """Where the model's chat template knows it; "none" where it knows `enable_thinking`, or nothing of reasoning."""
    generate_summary: Raw = ABSENT
    summary: Raw = ABSENT


class ResponseStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None
    """Accepted; we never pad events."""


class ResponsesRequest(SamplingFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    input: str | list[InputItem]
    """A text is a user's message."""
    instructions: str | None = None
    """A system message before all others."""
    max_output_tokens: int | None = None
    stream_options: ResponseStreamOptions | None = None
    text: ResponseText | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | FunctionChoice | None = None
    """By default "auto", which needs a server with --tool-call-parser; "required" and a function do not. With "none"
    the model is not shown the tools."""
    parallel_tool_calls: bool | None = None
    """False: one call at most; of several that the model writes, the first."""
    include: list[str] | None = None
    """Only "message.output_text.logprobs", and "reasoning.encrypted_content", which has no effect: reasoning is told
    as it is."""
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    """Told again in the answer; up to 16 pairs."""
    chat_template_kwargs: dict[str, Raw] | None = None
    """More variables of the model's chat template, such as {"enable_thinking": false}."""
    reasoning: Reasoning | None = None

    client_metadata: dict[str, str] | None = None
    """Harmless: accepted, and without effect. Codex sends it."""

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
