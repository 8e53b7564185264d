"""JSON schemas that constrain answers which must call tools."""

from collections.abc import Sequence

from loraserve.serving.errors import invalid_value
from loraserve.serving.text.conversation import JsonObject

NO_PARAMETERS: JsonObject = {"type": "object", "properties": {}, "additionalProperties": False}


def schema_of_calls(tools: Sequence[JsonObject], max_calls: int | None) -> JsonObject:
    """A list of one or more calls, as in vLLM. tools: in the form that templates receive. Raises `ServingError`."""
    calls = [_schema_of_call(index, tool) for index, tool in enumerate(tools)]
    most = {} if max_calls is None else {"maxItems": max_calls}
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most}


def schema_of_arguments(tool: JsonObject) -> JsonObject:
    """Always of type object. Raises `ServingError` if the tool's own schema has another type."""
    function = tool["function"]
    parameters = function.get("parameters") or NO_PARAMETERS
    if parameters.get("type", "object") != "object":
        raise invalid_value("tools", f"has {function['name']!r}, whose parameters are not of type 'object'.")
    # llguidance rejects a type next to a recursive reference.
    return parameters if "$ref" in parameters else {"type": "object"} | parameters


def _schema_of_call(index: int, tool: JsonObject) -> JsonObject:
    arguments = schema_of_arguments(tool)
    # NOTE: "#" and "#/$defs/..." are relative to the id; dialects before 2019 ignore an id next to "$ref".
    arguments = {name: value for name, value in arguments.items() if name != "$schema"} | {"$id": f"urn:tool:{index}"}
    properties = {"name": {"const": tool["function"]["name"]}, "parameters": arguments}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
