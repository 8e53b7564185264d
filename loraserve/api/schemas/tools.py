"""Tools that a chat's model may call, and its tool calls."""

import msgspec
from msgspec import Raw

from loraserve.api.schemas.unsupported import ABSENT


class ToolFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Raw] | None = None
    """A JSON Schema."""
    strict: bool | None = None
    """Without effect: arguments always follow the schema where `tool_choice` is "required" or a function, and are what
    the model writes where it is "auto"."""


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    """Only "function"."""
    function: ToolFunction | None = None
    # Known so that these tools are refused by their type.
    custom: Raw = ABSENT


class NamedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class NamedToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    function: NamedFunction | None = None
    # Known so that these choices are refused by their type.
    allowed_tools: Raw = ABSENT
    custom: Raw = ABSENT


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str
    """A JSON object, unless the model broke it off."""


class ResponseToolCall(msgspec.Struct, frozen=True):
    """A call in an answer."""

    id: str
    type: str
    function: CalledFunction


class FunctionDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """The first one of a call has all but the arguments, those that follow have these in pieces."""

    index: int
    function: FunctionDelta
    id: str | None = None
    type: str | None = None


class RequestFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str
    """A JSON object, unless the model broke it off; "" is an empty one."""
    parsed_arguments: Raw = ABSENT
    """Without effect: what OpenAI's `parse` and `stream` add to an answer."""


class RequestToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call in an assistant's message that a client sends back."""

    id: str
    function: RequestFunction | None = None
    type: str = "function"
    index: int | None = None
    """Without effect: what clients keep of a stream."""
    # Known so that these calls are refused by their type.
    custom: Raw = ABSENT
