"""Constraints on an answer: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from typing import Any

import msgspec
from msgspec import Raw

from loraserve.api.schemas.unsupported import ABSENT


class TextFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="text"):
    """No constraint."""


class JsonObjectFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="json_object"):
    """A JSON object."""

    schema: dict[str, Any] | None = None
    """A JSON Schema of at most 65,536 characters. Left out: any object."""


class JsonSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: dict[str, Any]
    """A JSON Schema of at most 65,536 characters."""
    name: str | None = None
    """Without effect."""
    description: str | None = None
    """Without effect: the model does not see it."""
    strict: bool | None = None
    """Without effect: answers always follow the schema."""


class JsonSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="json_schema"):
    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Exactly one of `json`, `json_object`, `regex`, `choice` and `grammar`."""

    json: dict[str, Any] | str | None = None
    """A JSON Schema, as an object or as text; at most 65,536 characters."""
    json_object: bool | None = None
    """True: any JSON object."""
    regex: str | None = None
    """A regular expression of at most 8,192 characters that the whole answer matches."""
    choice: list[str] | None = None
    """The answer is one of these texts."""
    grammar: str | None = None
    """A grammar of at most 8,192 characters, in Lark or GBNF syntax."""
    disable_any_whitespace: bool = False
    """True: no spaces and line breaks between JSON tokens. Only for JSON. Default: false."""
    whitespace_pattern: str | None = None
    """A regular expression for the whitespace between JSON tokens. Only for JSON. Default: one space, or a line break
    with at most 40 characters of indentation."""
    disable_fallback: bool = False
    """Without effect: there is only one implementation to use."""
    disable_additional_properties: Raw = ABSENT
    structural_tag: Raw = ABSENT
