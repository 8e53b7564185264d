"""Converts the text of a parameter to JSON by the type that the tool's schema declares."""

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

from loraserve.serving.tool_calls.python_literal import NotALiteral, read_literal

TYPES = NULL, INTEGER, NUMBER, BOOLEAN, OBJECT, ARRAY, STRING = (
    *("null", "integer", "number", "boolean"),
    *("object", "array", "string"),
)
"""In the order in which they are tried, which is vLLM's."""
MAX_REFERENCES = 16
"""Schemas examined for the types of one."""
INTEGER_TEXT = re.compile(r"-?(?:0|[1-9]\d*)", re.ASCII)
NUMBER_TEXT = re.compile(rf"{INTEGER_TEXT.pattern}(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
CONTAINERS = {OBJECT: msgspec.json.Decoder(dict[str, Raw]), ARRAY: msgspec.json.Decoder(list[Raw])}
PYTHON_CONTAINERS: dict[str, type] = {OBJECT: dict, ARRAY: list}


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The types that a schema declares by `type`, `enum`, `const`, `anyOf`, `oneOf`, `allOf` or a reference into
    `root`; empty = none."""
    types = set[str]()
    waiting, num_examined = [schema], 0
    while waiting and num_examined < MAX_REFERENCES:
        part = waiting.pop()
        num_examined += 1
        if not isinstance(part, dict):
            continue
        declared = part.get("type")
        types |= {each for each in (declared if isinstance(declared, list) else [declared]) if each in TYPES}
        if declared is None:
            values = [part["const"]] if "const" in part else part.get("enum")
            types |= {_type_of(value) for value in values} if isinstance(values, list) else set()
        for name in ("anyOf", "oneOf", "allOf"):
            waiting += part[name] if isinstance(part.get(name), list) else []
        if isinstance(part.get("$ref"), str):
            waiting.append(resolved(part["$ref"], root))
    return frozenset(types)


def resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """The schema that a reference such as `#/$defs/Digit` means; None if it is of another form."""
    if not reference.startswith("#/"):
        return None
    schema: Any = root
    for name in reference[2:].split("/"):
        if not isinstance(schema, dict):
            return None
        schema = schema.get(name.replace("~1", "/").replace("~0", "~"))
    return schema


def stays_text(types: frozenset[str]) -> bool:
    """Whether any text is a string, so that its beginning is known before its end."""
    return types <= {STRING}


def converted(text: str, types: frozenset[str]) -> str:
    """JSON. Text that is of none of the types is a string."""
    if stays_text(types):
        return string_json(text)
    stripped = text.strip()
    # Qwen's templates show earlier calls to the model with Python's names.
    if (NULL in types or STRING not in types) and stripped in ("null", "None"):
        return "null"
    for kind in TYPES:
        if kind in types and (value := _of_type(kind, stripped)) is not None:
            return value
    return string_json(text)


def string_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _of_type(kind: str, text: str) -> str | None:
    match kind:
        case "integer":
            return text if INTEGER_TEXT.fullmatch(text) else None
        case "number":
            return text if NUMBER_TEXT.fullmatch(text) else None
        case "boolean":
            return text.lower() if text.lower() in ("true", "false") else None
        case "object" | "array":
            return _container(kind, text)
        case _:
            return None


def _container(kind: str, text: str) -> str | None:
    """JSON as the model wrote it, or a Python literal as JSON."""
    try:
        CONTAINERS[kind].decode(text)
        return text
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        pass
    try:
        value = read_literal(text)
    except NotALiteral:
        return None
    return json.dumps(value, ensure_ascii=False) if isinstance(value, PYTHON_CONTAINERS[kind]) else None


def _type_of(value: Any) -> str:
    match value:
        case None:
            return NULL
        case bool():
            return BOOLEAN
        case int():
            return INTEGER
        case float():
            return NUMBER
        case str():
            return STRING
        case list():
            return ARRAY
        case _:
            return OBJECT
