from typing import Any

import pytest

from loraserve.api.inference.neutral_keywords import without_neutral_keywords

TEXT = {"type": "string"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({**TEXT, "format": "password"}, TEXT),
        ({"type": "object", "propertyNames": TEXT}, {"type": "object"}),
        ({"type": "array", "uniqueItems": False}, {"type": "array"}),
    ],
)
@pytest.mark.parametrize(
    "around",
    [
        lambda inner: inner,
        lambda inner: {"properties": {"a": inner, "format": inner}},
        lambda inner: {"$defs": {"a": {"items": inner}}, "$ref": "#/$defs/a"},
        lambda inner: {"anyOf": [{"type": "null"}, {"prefixItems": [inner]}]},
        lambda inner: {"additionalProperties": {"patternProperties": {"^x": inner}}},
    ],
)
def test_keywords_without_effect_are_removed_wherever_they_are(around: Any, given: Any, expected: Any) -> None:
    schema = around(given)
    assert without_neutral_keywords(schema) == around(expected)
    assert schema == around(given)


@pytest.mark.parametrize(
    "schema",
    [
        {**TEXT, "format": "date"},
        {**TEXT, "format": "regex"},
        {"propertyNames": {"pattern": "^a"}},
        {"uniqueItems": True},
        {"uniqueItems": 0},
        {"format": None},
        {"enum": [{"format": "password"}], "const": {"uniqueItems": False}},
        {"properties": {"format": TEXT, "propertyNames": TEXT, "uniqueItems": False}},
        {"properties": ["format"], "items": True, "anyOf": None},
    ],
)
def test_keywords_with_an_effect_and_other_names_are_kept(schema: dict[str, Any]) -> None:
    assert without_neutral_keywords(schema) is schema
