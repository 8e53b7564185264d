"""Answers that have to call tools: the schema that they are held to, and the calls that they are."""

from collections.abc import Sequence

import msgspec

from loraserve.serving.conversation import JsonObject
from loraserve.serving.errors import invalid_value
from loraserve.serving.tool_calls.formats import FoundCall, read_arguments, read_calls

NO_PARAMETERS: JsonObject = {"type": "object", "properties": {}, "additionalProperties": False}
DEFINITIONS = ("$defs", "definitions")
"""What "#/$defs/..." points to lies in the schema as a whole."""


def schema_of_calls(tools: Sequence[JsonObject], max_calls: int | None) -> JsonObject:
    """A list of one call or more, as vLLM has it. tools: as templates get them. Raises `ServingError`."""
    shared: JsonObject = {}
    calls = [_call(f"tools[{index}]", tool["function"], shared) for index, tool in enumerate(tools)]
    most = {} if max_calls is None else {"maxItems": max_calls}
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most, **shared}


def schema_of_arguments(tool: JsonObject) -> JsonObject:
    """What it is called with."""
    return tool["function"].get("parameters") or NO_PARAMETERS


def calls_of(text: str, named: str | None) -> list[FoundCall]:
    """Of a whole answer; none if it was cut off. named: whose arguments it is; None = it is a list of calls."""
    try:
        return read_calls(text) if named is None else [read_arguments(named, text)]
    except (msgspec.DecodeError, RecursionError):
        return []


def _call(param: str, function: JsonObject, shared: JsonObject) -> JsonObject:
    """Definitions are moved to `shared`."""
    parameters = dict(function.get("parameters") or NO_PARAMETERS)
    for place in DEFINITIONS:
        definitions = parameters.pop(place, {})
        if not isinstance(definitions, dict):
            raise invalid_value(f"{param}.function.parameters.{place}", "is not an object.")
        for name, definition in definitions.items():
            if shared.setdefault(place, {}).setdefault(name, definition) != definition:
                message = "is not what an earlier tool has there. Give one of them another name."
                raise invalid_value(f"{param}.function.parameters.{place}.{name}", message)
    properties = {"name": {"const": function["name"]}, "parameters": parameters}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
