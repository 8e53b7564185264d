from typing import Any

import pytest

from loraserve.api.inference.schema_cost import check_cost
from loraserve.serving.errors import ServingError
from loraserve.serving.settings import RequestLimits

LIMITS = RequestLimits(max_grammar_chars=10, max_multiple_of=100)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "integer", "multipleOf": 100},
        {"multipleOf": 99},
        {"multipleOf": 1_000_000},
        {"multipleOf": 0.01},
        {"multipleOf": 123.5},
        {"multipleOf": 0},
        {"properties": {"multipleOf": {"type": "integer"}}},
        {"multipleOf": "x"},
        {"anyOf": [{"multipleOf": 49}, {"multipleOf": 51.0}]},
        {"enum": ["x" * 10, True, None, 1.5]},
    ],
)
def test_cheap_schemas_are_accepted(schema: dict[str, Any]) -> None:
    check_cost("schema", schema, LIMITS)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"multipleOf": 101}, "has 101 possible remainders of 'multipleOf'; the limit is 100"),
        ({"multipleOf": -101}, "multipleOf"),
        ({"multipleOf": 101.0}, "multipleOf"),
        ({"multipleOf": 1e300}, "multipleOf"),
        ({"multipleOf": 10**5000 + 1}, "multipleOf"),
        ({"anyOf": [{"multipleOf": 49}, {"items": [{"multipleOf": 52}]}]}, "multipleOf"),
        ({"properties": {"a": {"const": "x" * 11}}}, "has 11 characters in one string; the limit is 10"),
    ],
)
def test_expensive_schemas_are_refused(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(ServingError, match=message) as refused:
        check_cost("schema", schema, LIMITS)
    assert refused.value.param == "schema"
