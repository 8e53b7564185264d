"""The input of a chat template."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

JsonObject = dict[str, Any]

FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""As in OpenAI's API."""
MESSAGE_SIZE = 32
"""Characters that a template adds per message, at least in terms of time."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call made by the assistant."""

    id: str
    name: str
    arguments: str
    """A JSON object as text, or whatever the model wrote instead."""

    def for_template(self) -> JsonObject:
        """Parses the arguments if they are JSON."""
        try:
            arguments = msgspec.json.decode(self.arguments)
        except msgspec.DecodeError:
            arguments = self.arguments
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str | None
    """None only together with tool calls."""
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """For role "tool": the call whose result this is."""
    reasoning: str | None = None
    """For role "assistant": its reasoning before this message."""

    @property
    def num_chars(self) -> int:
        num_called = sum(len(call.name) + len(call.arguments) for call in self.tool_calls)
        return len(self.content or "") + len(self.reasoning or "") + num_called

    def for_template(self, developer_role: str) -> JsonObject:
        """A dict, because templates index messages like JSON objects and test which keys exist."""
        role = developer_role if self.role == "developer" else self.role
        message: JsonObject = {"role": role, "content": self.content}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.reasoning is not None:
            # Templates use one name or the other.
            message["reasoning_content"] = message["reasoning"] = self.reasoning
        return message


@dataclass(frozen=True, slots=True)
class ReasoningEffort:
    param: str
    """The request field that sets it."""
    value: str
    word: str | None = None
    """The field's value, if it differs from `value`."""
    is_default: bool = False
    """Whether it equals the default: then a template without an effort variable is acceptable."""

    @property
    def is_none(self) -> bool:
        return self.value == "none"


@dataclass(frozen=True, slots=True)
class ReasoningBudget:
    param: str
    """The request field that sets it."""
    max_tokens: int
    """Most tokens of reasoning."""


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: Sequence[ChatMessage]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[JsonObject] = ()
    """As in OpenAI's API."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Additional template variables."""
    effort: ReasoningEffort | None = None
    budget: ReasoningBudget | None = None
    """None = only the answer's limit ends the reasoning."""
    param: str = "messages"
    """The request's name for the messages, for errors."""

    @property
    def num_chars(self) -> int:
        """Approximate number of characters once rendered."""
        num_chars = sum(message.num_chars for message in self.messages)
        return num_chars + len(msgspec.json.encode(self.tools)) if self.tools else num_chars

    @property
    def work_size(self) -> int:
        """Amount of rendering and tokenizing work, in characters."""
        return self.num_chars + MESSAGE_SIZE * len(self.messages)
