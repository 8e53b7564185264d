import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from

from loraserve.api.chat.forced_calls import schema_of_arguments, schema_of_calls
from loraserve.serving.errors import ServingError


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | ({} if parameters is None else {"parameters": parameters})}


def follows(schema: dict[str, Any], value: Any) -> bool:
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, grammar_from("json_schema", json.dumps(schema)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(tokenizer.tokenize_str(json.dumps(value))) and matcher.is_accepting()


def calling(name: str, parameters: Any) -> list[dict[str, Any]]:
    return [{"name": name, "parameters": parameters}]


def test_the_schema_allows_only_lists_of_calls_of_the_tools() -> None:
    schema = schema_of_calls([tool("add", {"required": ["a"]}), tool("now")], None)
    for good in (calling("add", {"a": 1}), calling("now", {}), calling("now", {}) * 3):
        assert follows(schema, good), good
    for bad in ([], calling("sub", {}), calling("add", {}), calling("add", ["a"]), calling("now", {"a": 1}), {}):
        assert not follows(schema, bad), bad
    assert not follows(schema_of_calls([tool("now")], 1), calling("now", {}) * 2)


@pytest.mark.parametrize(
    "dialect", [None, "https://json-schema.org/draft/2020-12/schema", "http://json-schema.org/draft-07/schema#"]
)
@pytest.mark.parametrize("place", ["$defs", "definitions"])
def test_references_are_relative_to_the_parameters_they_are_in(place: str, dialect: str | None) -> None:
    header = {} if dialect is None else {"$schema": dialect}

    def tree_of(of: str) -> dict[str, Any]:
        node = {
            "type": "object",
            "properties": {"v": {"type": of}, "sub": {"$ref": "#"}},
            "additionalProperties": False,
        }
        return header | {"$ref": f"#/{place}/Node", place: {"Node": node}}

    numbers, texts = tool("numbers", tree_of("integer")), tool("texts", tree_of("string"))
    schema = schema_of_calls([numbers, texts], None)
    for name, right, wrong in (("numbers", 1, "x"), ("texts", "x", 1)):
        assert follows(schema, calling(name, {"v": right, "sub": {"v": right}}))
        assert not follows(schema, calling(name, {"v": wrong}))
        assert not follows(schema, calling(name, {"sub": {"v": wrong}}))
    assert follows(schema_of_arguments(numbers), {"sub": {"v": 1}})
    assert not follows(schema_of_arguments(numbers), {"sub": {"v": "x"}})


def test_arguments_must_always_be_an_object() -> None:
    for parameters in (None, {}, {"description": "Anything."}, {"anyOf": [{"type": "object"}, {"type": "string"}]}):
        schema = schema_of_arguments(tool("f", parameters))
        assert follows(schema, {})
        assert not follows(schema, "x")
    for other in ("array", ["object", "null"]):
        with pytest.raises(ServingError, match="'f', whose parameters are not of type 'object'") as refused:
            schema_of_arguments(tool("f", {"type": other}))
        assert refused.value.param == "tools"


def test_building_the_schema_does_not_change_the_tools_as_sent() -> None:
    parameters = {"$schema": "http://json-schema.org/draft-07/schema#", "$id": "x", "properties": {}}
    schema_of_calls([tool("f", parameters)], None)
    assert list(parameters) == ["$schema", "$id", "properties"]
