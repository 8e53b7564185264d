"""Keywords of JSON schemas that have no effect: zod, pydantic and OpenAPI write them, but llguidance rejects them like
any keyword that it does not support."""

from collections.abc import Iterator
from typing import Any

import msgspec

FORMATS = frozenset(
    {
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "idn-email",
        "idn-hostname",
        "ipv4",
        "ipv6",
        "iri",
        "iri-reference",
        "json-pointer",
        "regex",
        "relative-json-pointer",
        "time",
        "uri",
        "uri-reference",
        "uri-template",
        "uuid",
    }
)
"""Defined by JSON Schema. Other formats, such as "password" or "path", do not restrict which strings are valid."""
ANY_NAME = ({}, {"type": "string"})
OF_SCHEMAS = frozenset(
    {
        "additionalItems",
        "additionalProperties",
        "allOf",
        "anyOf",
        "contains",
        "else",
        "if",
        "items",
        "not",
        "oneOf",
        "prefixItems",
        "propertyNames",
        "then",
    }
)
"""Keywords whose value is a schema or a list of schemas."""
OF_NAMED_SCHEMAS = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})


def without_neutral_keywords(schema: dict[str, Any]) -> dict[str, Any]:
    """The same object if there are no such keywords, otherwise a copy."""
    if not any(map(_neutral_keywords, _schemas_in(schema))):
        return schema
    copy = msgspec.json.decode(msgspec.json.encode(schema))
    for node in _schemas_in(copy):
        for keyword in _neutral_keywords(node):
            del node[keyword]
    return copy


def _neutral_keywords(node: dict[str, Any]) -> list[str]:
    return [keyword for keyword, value in node.items() if _is_neutral(keyword, value)]


def _is_neutral(keyword: str, value: Any) -> bool:
    match keyword:
        case "format":
            return isinstance(value, str) and value not in FORMATS
        case "propertyNames":
            return value in ANY_NAME
        case "uniqueItems":
            return value is False
        case _:
            return False


def _schemas_in(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schema and all schemas in it: contents of an `enum` are values, and names of properties are not keywords."""
    left: list[Any] = [schema]
    while left:
        node = left.pop()
        if isinstance(node, list):
            left += node
        elif isinstance(node, dict):
            yield node
            left += [value for keyword, value in node.items() if keyword in OF_SCHEMAS]
            for keyword in OF_NAMED_SCHEMAS & node.keys():
                if isinstance(node[keyword], dict):
                    left += node[keyword].values()
