import json
from typing import Any

import pytest

from loraserve.serving.tool_calls.parameter_types import converted, resolved, types_of

ROOT: dict[str, Any] = {
    "$defs": {
        "Digit": {"type": "integer"},
        "a/b": {"$ref": "#/$defs/Digit"},
        "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}]},
    }
}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        (
            {"anyOf": [{"type": "integer"}, {"oneOf": [{"type": "null"}, {"enum": ["a", 1.5]}]}]},
            {"integer", "null", "string", "number"},
        ),
        ({"const": True}, {"boolean"}),
        ({"enum": [[], {}, None]}, {"array", "object", "null"}),
        ({"$ref": "#/$defs/Digit"}, {"integer"}),
        ({"allOf": [{"$ref": "#/$defs/a~1b"}]}, {"integer"}),
        ({"$ref": "#/$defs/Loop"}, set()),
        ({"$ref": "#/$defs/Other"}, set()),
        ({"$ref": "https://example.com"}, set()),
        ({"type": "file", "description": "x"}, set()),
        ({"type": {}, "enum": 5, "anyOf": 3, "$ref": 4}, set()),
        (True, set()),
        (None, set()),
    ],
)
def test_the_types_are_those_that_the_schema_declares(schema: Any, types: set[str]) -> None:
    assert types_of(schema, ROOT) == types


def test_a_reference_leads_into_the_root_schema() -> None:
    assert resolved("#/$defs/Digit", ROOT) == {"type": "integer"}
    assert resolved("#/$defs/Digit/type/x", ROOT) is None


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("3", {"string"}, "3"),
        ("3", set(), "3"),
        ("null", {"string"}, "null"),
        ("null", {"string", "null"}, None),
        ("None", {"integer"}, None),
        (" 3 ", {"integer"}, 3),
        ("03", {"integer"}, "03"),
        ("3.5", {"integer"}, "3.5"),
        ("٣", {"integer"}, "٣"),
        ("3.0", {"number"}, 3.0),
        ("-1e-3", {"number"}, -0.001),
        ("NaN", {"number"}, "NaN"),
        ("True", {"boolean"}, True),
        ("false", {"boolean"}, False),
        ("yes", {"boolean"}, "yes"),
        ("3", {"integer", "string"}, 3),
        ("three", {"integer", "string"}, "three"),
        ('{"a": [1]}', {"object"}, {"a": [1]}),
        ("[1, 2]", {"object"}, "[1, 2]"),
        ("[1, 2]", {"object", "array"}, [1, 2]),
        ("{'a': (1, None)}", {"object"}, {"a": [1, None]}),
        ('{"a": 1', {"object"}, '{"a": 1'),
        ('["\ud800"]', {"array"}, ["�"]),
    ],
)
def test_text_is_converted_to_one_of_the_types_or_stays_text(text: str, types: set[str], value: Any) -> None:
    decoded = json.loads(converted(text, frozenset(types)))
    assert (decoded, type(decoded)) == (value, type(value))
