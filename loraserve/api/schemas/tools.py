"""Tools that the model of a chat may call, and its calls."""

import msgspec
from msgspec import Raw

from loraserve.api.schemas.unsupported import ABSENT


class ToolFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Raw] | None = None
    """A JSON Schema of the arguments."""
    strict: bool | None = None
    """Without effect. If `tool_choice` is "required" or a function, arguments always follow the schema; if it is
    "auto", they are whatever the model writes."""
    cache_control: Raw = ABSENT
    """Without effect: prefixes are always cached."""


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    """Only "function"."""
    function: ToolFunction | None = None
    cache_control: Raw = ABSENT
    """Without effect: prefixes are always cached."""
    # Known so that these tools are refused by their type.
    custom: Raw = ABSENT


class NamedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class NamedToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The function that the model must call."""

    type: str
    """Only "function"."""
    function: NamedFunction | None = None
    # Known so that these choices are refused by their type.
    allowed_tools: Raw = ABSENT
    custom: Raw = ABSENT


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str
    """A JSON object, unless the model stopped in the middle of it."""


class ResponseToolCall(msgspec.Struct, frozen=True):
    """A call in an answer."""

    id: str
    type: str
    """ "function"."""
    function: CalledFunction


class FunctionDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of a call. The first one has everything but the arguments; the ones after it have these in pieces."""

    index: int
    function: FunctionDelta
    id: str | None = None
    type: str | None = None


class RequestFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str
    """A JSON object, which may be incomplete if the model stopped in the middle of it; "" means {}."""
    parsed_arguments: Raw = ABSENT
    """Without effect. OpenAI's `parse` and `stream` add it to an answer."""


class RequestToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call in an assistant's message that a client sends back."""

    id: str
    function: RequestFunction | None = None
    type: str = "function"
    index: int | None = None
    """Without effect. Clients keep it from a stream."""
    # Known so that these calls are refused by their type.
    custom: Raw = ABSENT
