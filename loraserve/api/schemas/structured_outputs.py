"""What an answer is held to: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from typing import Any

import msgspec
from msgspec import Raw

from loraserve.api.schemas.unsupported import ABSENT


class TextFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="text"):
    """Anything."""


class JsonObjectFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="json_object"):
    schema: dict[str, Any] | None = None
    """Left out: any object."""


class JsonSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: dict[str, Any]
    name: str | None = None
    """Without effect."""
    description: str | None = None
    """Without effect: the model is not shown it."""
    strict: bool | None = None
    """Without effect: answers always follow the schema."""


class JsonSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="json_schema"):
    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One of `json`, `json_object`, `regex`, `choice` and `grammar`."""

    json: dict[str, Any] | str | None = None
    """A JSON schema."""
    json_object: bool | None = None
    """Any JSON object."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """Lark or GBNF."""
    disable_any_whitespace: bool = False
    """JSON without spaces and line breaks between its tokens."""
    whitespace_pattern: str | None = None
    """A regular expression for what may stand between JSON's tokens; by default a space, or a line break with
    indentation."""
    disable_fallback: bool = False
    """Without effect: there is no other way that could be fallen back to."""
    disable_additional_properties: Raw = ABSENT
    structural_tag: Raw = ABSENT
