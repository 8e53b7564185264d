from typing import Any

import pytest

from loraserve.api.forced_calls import NO_PARAMETERS, calls_of, schema_of_arguments, schema_of_calls
from loraserve.serving.errors import ServingError
from loraserve.serving.tool_calls.formats import FoundCall

POINT = {"$defs": {"Axis": {"type": "integer"}}, "type": "object", "properties": {"x": {"$ref": "#/$defs/Axis"}}}


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | ({} if parameters is None else {"parameters": parameters})}


def test_a_call_is_one_of_the_tools_with_its_parameters() -> None:
    schema = schema_of_calls([tool("add", {"type": "object"}), tool("now")], None)
    assert (schema["type"], schema["minItems"], schema.get("maxItems")) == ("array", 1, None)
    assert [each["properties"] for each in schema["items"]["anyOf"]] == [
        {"name": {"const": "add"}, "parameters": {"type": "object"}},
        {"name": {"const": "now"}, "parameters": NO_PARAMETERS},
    ]
    assert all(each["additionalProperties"] is False for each in schema["items"]["anyOf"])
    assert schema_of_calls([tool("now")], 1)["maxItems"] == 1


def test_definitions_are_where_references_look_for_them() -> None:
    schema = schema_of_calls([tool("draw", POINT), tool("move", POINT)], None)
    assert schema["$defs"] == POINT["$defs"]
    assert "$defs" not in schema["items"]["anyOf"][0]["properties"]["parameters"]
    assert "$defs" in POINT, "what the template shows is as it was sent"
    assert schema_of_arguments(tool("draw", POINT)) == POINT
    assert schema_of_arguments(tool("now")) == NO_PARAMETERS


@pytest.mark.parametrize(
    ("other", "param"),
    [
        (POINT | {"$defs": {"Axis": {"type": "string"}}}, "tools[1].function.parameters.$defs.Axis"),
        (POINT | {"$defs": 3}, "tools[1].function.parameters.$defs"),
        (POINT | {"definitions": []}, "tools[1].function.parameters.definitions"),
    ],
)
def test_definitions_that_cannot_stand_together(other: dict[str, Any], param: str) -> None:
    with pytest.raises(ServingError) as refused:
        schema_of_calls([tool("draw", POINT), tool("move", other)], None)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("text", "named", "expected"),
    [
        ('[{"name": "a", "parameters": {"x": 1}}]', None, [FoundCall("a", '{"x": 1}')]),
        (
            ' [{"name":"a","parameters":{}},\n{"name":"b","parameters":{}}]',
            None,
            [FoundCall("a", "{}"), FoundCall("b", "{}")],
        ),
        ('{"x": 1}', "a", [FoundCall("a", '{"x": 1}')]),
        ('[{"name": "a", "parameters": {"x"', None, []),
        ('{"x": 1', "a", []),
        ("", None, []),
        ("", "a", []),
    ],
)
def test_what_an_answer_calls(text: str, named: str | None, expected: list[FoundCall]) -> None:
    assert calls_of(text, named) == expected
