"""All that a chat template is given."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

JsonObject = dict[str, Any]

FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""As in OpenAI's API."""
MESSAGE_SIZE = 32
"""What a template adds to each message, at least in time."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One that the assistant made."""

    id: str
    name: str
    arguments: str
    """A JSON object as text, or what a model wrote of one."""

    def for_template(self) -> JsonObject:
        """Arguments that are JSON are parsed."""
        try:
            arguments = msgspec.json.decode(self.arguments)
        except msgspec.DecodeError:
            arguments = self.arguments
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str | None
    """None only beside tool calls."""
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """Of role "tool": which call's result it is."""
    reasoning: str | None = None
    """Of role "assistant": what it thought before it said this."""

    @property
    def num_chars(self) -> int:
        num_called = sum(len(call.name) + len(call.arguments) for call in self.tool_calls)
        return len(self.content or "") + len(self.reasoning or "") + num_called

    def for_template(self, developer_role: str) -> JsonObject:
        """Templates index messages like JSON objects, and ask which keys there are."""
        role = developer_role if self.role == "developer" else self.role
        message: JsonObject = {"role": role, "content": self.content}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.reasoning is not None:
            # Templates know it by the one name or the other.
            message["reasoning_content"] = message["reasoning"] = self.reasoning
        return message


@dataclass(frozen=True, slots=True)
class ReasoningEffort:
    param: str
    """The field that asks for it."""
    value: str
    word: str | None = None
    """What the field says, where that is not `value`."""
    is_default: bool = False
    """Whether it is what holds without it: a template that knows no effort does not have to be told."""

    @property
    def is_none(self) -> bool:
        return self.value == "none"


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: Sequence[ChatMessage]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[JsonObject] = ()
    """As in OpenAI's API."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """More variables of the template."""
    effort: ReasoningEffort | None = None
    param: str = "messages"
    """What the request calls the messages, for errors."""

    @property
    def num_chars(self) -> int:
        """About how many it will have once it is rendered."""
        num_chars = sum(message.num_chars for message in self.messages)
        return num_chars + len(msgspec.json.encode(self.tools)) if self.tools else num_chars

    @property
    def work_size(self) -> int:
        """How much there is to render and tokenise, in characters."""
        return self.num_chars + MESSAGE_SIZE * len(self.messages)
