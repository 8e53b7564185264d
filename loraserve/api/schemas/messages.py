"""/v1/messages, Anthropic's API: what is asked."""

from typing import Any

import msgspec
from msgspec import Raw

from loraserve.api.schemas.sampling import SamplingFields
from loraserve.api.schemas.unsupported import ABSENT

CacheControl = dict[str, Raw]
"""Asks for a cached prefix, which every prompt has: accepted, whatever it says."""


class TextBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="text"):
    text: str
    cache_control: CacheControl | None = None
    """Without effect: prefixes are always cached."""
    citations: Raw = ABSENT


class ThinkingBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="thinking"):
    """Of the assistant, as answers have it. The model's template says whether the model is shown it."""

    thinking: str
    signature: str | None = None
    """Without effect: nothing is signed."""


class RedactedThinkingBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="redacted_thinking"):
    """Of another server's answer. Left out: only that server can read it."""

    data: str


class ToolUseBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="tool_use"):
    """Of the assistant: a call."""

    id: str
    name: str
    input: dict[str, Raw]
    cache_control: CacheControl | None = None
    """Without effect: prefixes are always cached."""
    caller: Raw = ABSENT
    toolset_name: Raw = ABSENT


class ToolResultBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="tool_result"):
    """Of the user: what a call gave."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    """True: the model is shown "Error: " before the content."""
    cache_control: CacheControl | None = None
    """Without effect: prefixes are always cached."""
    toolset_name: Raw = ABSENT


ContentBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class InputMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: str
    """ "user", "assistant" or "system"."""
    content: str | list[ContentBlock]


class MessageTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    input_schema: dict[str, Raw]
    """A JSON Schema."""
    description: str | None = None
    type: str | None = None
    """Only "custom"."""
    strict: bool | None = None
    """Without effect: input always follows the schema where `tool_choice` is "any" or "tool", and is what the model
    writes where it is "auto"."""
    eager_input_streaming: bool | None = None
    """True: input is streamed as it is written, whether or not it becomes a JSON object. Else it comes in one piece."""
    cache_control: CacheControl | None = None
    """Without effect: prefixes are always cached."""
    allowed_callers: Raw = ABSENT
    defer_loading: Raw = ABSENT
    input_examples: Raw = ABSENT


class MessageToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    """ "auto", which needs a server with --tool-call-parser, "any", "tool", which do not, or "none"."""
    name: str | None = None
    """Of "tool"."""
    disable_parallel_tool_use: bool | None = None
    """True: one call at most; of several that the model writes, the first."""


class MessageMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    user_id: str | None = None
    """Whom a canary of an adapter sticks to, unless `safety_identifier` or `user` is given."""


class Thinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    """ "enabled" and "disabled" set `enable_thinking` where the model's chat template knows it; "adaptive" leaves it to
    the template."""
    budget_tokens: int | None = None
    """Of "enabled". Where reasoning is told apart (--reasoning-parser), at least `max_tokens` - 1: it is not ended
    earlier."""
    display: str | None = None
    """Only "summarized": thinking is told, and as it is."""


class MessageFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="json_schema"):
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: MessageFormat | None = None
    """Holds the answer to a JSON schema. It does not say so to the model: the system prompt should."""
    effort: str | None = None
    """Where the model's chat template knows it; "high" everywhere, as it is what holds without it."""
    task_budget: Raw = ABSENT


class MessagesRequest(SamplingFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    max_tokens: int
    """At most: an answer for which the model's context has less room ends with "model_context_window_exceeded"."""
    messages: list[InputMessage]
    """If the last one is the assistant's, the answer goes on with it."""
    system: str | list[TextBlock] | None = None
    stop_sequences: list[str] | None = None
    """Also taken as `stop`."""
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    """By default "auto". With "none" the model is not shown the tools."""
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    metadata: MessageMetadata | None = None
    chat_template_kwargs: dict[str, Raw] | None = None
    """More variables of the model's chat template, such as {"enable_thinking": false}."""
    cache_control: CacheControl | None = None
    """Without effect: prefixes are always cached."""
    service_tier: str | None = None
    """Only "auto" or "standard_only"; without effect."""

    container: Raw = ABSENT
    context_management: Raw = ABSENT
    diagnostics: Raw = ABSENT
    inference_geo: Raw = ABSENT
    mcp_servers: Raw = ABSENT
    speed: Raw = ABSENT
    thread: Raw = ABSENT


class CountTokensRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a message's prompt is made of."""

    messages: list[InputMessage]
    model: str | None = None
    system: str | list[TextBlock] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    """Its format is no part of the prompt."""
    chat_template_kwargs: dict[str, Raw] | None = None
    add_special_tokens: bool | None = None
    cache_control: CacheControl | None = None

    context_management: Raw = ABSENT
    mcp_servers: Raw = ABSENT
    speed: Raw = ABSENT
