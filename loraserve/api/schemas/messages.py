"""/v1/messages, Anthropic's API: requests."""

from typing import Any

import msgspec
from msgspec import Raw

from loraserve.api.schemas.sampling import SamplingFields
from loraserve.api.schemas.unsupported import ABSENT

CacheControl = dict[str, Raw]
"""Requests that a prefix be cached; every prefix is, so any value is accepted."""


class TextBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="text"):
    text: str
    cache_control: CacheControl | None = None
    """Without effect: prefixes are always cached."""
    citations: Raw = ABSENT


class ThinkingBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="thinking"):
    """An assistant's thinking, as in an earlier answer. The model's chat template decides whether the model sees it."""

    thinking: str
    signature: str | None = None
    """Without effect: nothing is signed."""


class RedactedThinkingBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="redacted_thinking"):
    """Thinking in another server's answer. Ignored, because only that server can read it."""

    data: str


class ToolUseBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="tool_use"):
    """An assistant's call of a tool."""

    id: str
    name: str
    input: dict[str, Raw]
    """The call's arguments."""
    cache_control: CacheControl | None = None
    """Without effect: prefixes are always cached."""
    caller: Raw = ABSENT
    toolset_name: Raw = ABSENT


class ToolResultBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="tool_result"):
    """The result of a call, in a user's message."""

    tool_use_id: str
    """The `id` of the call."""
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    """True: "Error: " is put before the content that the model sees."""
    cache_control: CacheControl | None = None
    """Without effect: prefixes are always cached."""
    toolset_name: Raw = ABSENT


ContentBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class InputMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: str
    """ "user", "assistant" or "system"."""
    content: str | list[ContentBlock]


class MessageTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool that the model may call."""

    name: str
    input_schema: dict[str, Raw]
    """A JSON Schema of the input."""
    description: str | None = None
    type: str | None = None
    """Only "custom"."""
    strict: bool | None = None
    """Without effect. If `tool_choice` is "any" or "tool", the input always follows the schema; if it is "auto", it is
    whatever the model writes."""
    eager_input_streaming: bool | None = None
    """True: stream the input as the model writes it, even if it does not become a JSON object. False (the default):
    send it in one piece once complete."""
    cache_control: CacheControl | None = None
    """Without effect: prefixes are always cached."""
    allowed_callers: Raw = ABSENT
    defer_loading: Raw = ABSENT
    input_examples: Raw = ABSENT


class MessageToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    """ "auto", which needs a server with --tool-call-parser; "any" or "tool", which do not; or "none", with which the
    model is not shown the tools."""
    name: str | None = None
    """Name of the tool; only for type "tool"."""
    disable_parallel_tool_use: bool | None = None
    """True: at most one call; if the model writes several, the answer has only the first."""


class MessageMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    user_id: str | None = None
    """Identifies the end user for an adapter's canary, unless `safety_identifier` or `user` is sent."""


class Thinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether the model thinks before it answers."""

    type: str
    """ "enabled" and "disabled" set the chat template's variable `enable_thinking`, if it uses it; "adaptive" leaves
    the decision to the template."""
    budget_tokens: int | None = None
    """Most tokens of thinking, at least 1, after which the answer begins. Required for type "enabled"; not for
    others."""
    display: str | None = None
    """Only "summarized" is accepted; thinking is returned in full."""


class MessageFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="json_schema"):
    schema: dict[str, Any]
    """A JSON Schema."""


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: MessageFormat | None = None
    """Constrains the answer to a JSON schema. The model is not told about it: describe it in the system prompt."""
    effort: str | None = None
    """ "low", "medium", "high", "xhigh" or "max". Needs a chat template that uses it, except for "high", the default,
    which is always accepted."""
    task_budget: Raw = ABSENT


class MessagesRequest(SamplingFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Field names and meanings as in Anthropic's API; the sampling fields are those of /v1/completions."""

    max_tokens: int
    """Most tokens of the answer, at least 1. If the model's context has less room, an answer that fills it ends with
    "model_context_window_exceeded"."""
    messages: list[InputMessage]
    """At most 4,096. If the last message is the assistant's, the answer continues it."""
    system: str | list[TextBlock] | None = None
    """The system prompt."""
    stop_sequences: list[str] | None = None
    """At most 16 strings of at most 256 characters. Also accepted as `stop`."""
    tools: list[MessageTool] | None = None
    """At most 128, with 256 KiB of names, descriptions and schemas in total."""
    tool_choice: MessageToolChoice | None = None
    """Default: "auto"."""
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    metadata: MessageMetadata | None = None
    chat_template_kwargs: dict[str, Raw] | None = None
    """More variables of the model's chat template, such as {"enable_thinking": false}; at most 32, with 16 KiB of
    JSON."""
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
    """The fields that determine a message's prompt, as in MessagesRequest."""

    messages: list[InputMessage]
    model: str | None = None
    system: str | list[TextBlock] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    """Its `format` is not part of the prompt."""
    chat_template_kwargs: dict[str, Raw] | None = None
    add_special_tokens: bool | None = None
    cache_control: CacheControl | None = None

    context_management: Raw = ABSENT
    mcp_servers: Raw = ABSENT
    speed: Raw = ABSENT
