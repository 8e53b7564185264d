from typing import Any

import msgspec
import pytest

from loraserve.api.inference.structured_outputs import WHITESPACE, formats_of, grammar_of
from loraserve.api.schemas.completions import CompletionRequest
from loraserve.engine.request import Grammar, GrammarCalls, GrammarKind
from loraserve.serving.errors import ServingError
from loraserve.serving.settings import RequestLimits

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
LAYOUT = {"x-guidance": {"whitespace_pattern": WHITESPACE}}


def grammar(**fields: Any) -> Grammar | None:
    request = msgspec.json.decode(msgspec.json.encode({"prompt": "x"} | fields), type=CompletionRequest)
    return grammar_of(request, RequestLimits(max_schema_chars=400, max_grammar_chars=40), formats_of(request))


def schema_of(found: Grammar | None) -> dict[str, Any]:
    assert found is not None
    assert found.kind is GrammarKind.JSON_SCHEMA
    return msgspec.json.decode(found.text)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None, "structured_outputs": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False}},
    ],
)
def test_a_request_without_constraints_has_no_grammar(fields: dict[str, Any]) -> None:
    assert grammar(**fields) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"structured_outputs": {"json": SCHEMA}},
        {"guided_json": SCHEMA},
        {"structured_outputs": {"json": msgspec.json.encode(SCHEMA).decode()}},
    ],
)
def test_every_way_to_send_a_schema_gives_the_same_grammar(fields: dict[str, Any]) -> None:
    assert schema_of(grammar(**fields)) == SCHEMA | LAYOUT
    assert list(schema_of(grammar(**fields))["properties"]) == ["b", "a"], "answers have the schema's order"


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
def test_any_json_object_can_be_requested(fields: dict[str, Any]) -> None:
    assert schema_of(grammar(**fields)) == {"type": "object"} | LAYOUT


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"disable_any_whitespace": True}, {"whitespace_flexible": False}),
        ({"whitespace_pattern": "_?"}, {"whitespace_pattern": "_?"}),
        ({"disable_fallback": True}, LAYOUT["x-guidance"]),
    ],
)
def test_whitespace_is_as_requested(options: dict[str, Any], expected: dict[str, Any]) -> None:
    assert schema_of(grammar(structured_outputs={"json": SCHEMA, **options}))["x-guidance"] == expected


def test_the_whitespace_pattern_is_accepted_under_its_older_name() -> None:
    options = schema_of(grammar(guided_json=SCHEMA, guided_whitespace_pattern="_?"))["x-guidance"]
    assert options == {"whitespace_pattern": "_?"}


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ({"regex": r"\d+"}, Grammar(GrammarKind.REGEX, r"\d+")),
        ({"choice": ["yes", 'say "no"']}, Grammar(GrammarKind.CHOICE, '["yes","say \\"no\\""]')),
        ({"grammar": 'start: "a"'}, Grammar(GrammarKind.GRAMMAR, 'start: "a"')),
    ],
)
def test_regexes_choices_and_grammars_are_accepted_under_both_names(outputs: dict[str, Any], expected: Grammar) -> None:
    assert grammar(structured_outputs=outputs) == expected
    assert grammar(**{f"guided_{name}": value for name, value in outputs.items()}) == expected


def test_a_format_may_be_repeated_under_its_older_name() -> None:
    """As by guidance's client for vLLM."""
    found = grammar(guided_grammar='start: "a"', structured_outputs={"grammar": 'start: "a"'})
    assert found == Grammar(GrammarKind.GRAMMAR, 'start: "a"')
    with pytest.raises(ServingError, match="cannot be combined"):
        grammar(guided_json={"const": 1}, structured_outputs={"json": {"const": True}})
    with pytest.raises(ServingError, match="cannot be combined"):  # one lets the model call tools, the other does not
        grammar(guided_json={"type": "object"}, response_format={"type": "json_object"})


@pytest.mark.parametrize(
    "response_format", [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": SCHEMA}}]
)
def test_a_response_format_does_not_apply_to_forced_calls(response_format: object) -> None:
    forced = {"enum": ["a call"]}
    fields = {"prompt": "x", "response_format": response_format}
    request = msgspec.convert(fields, CompletionRequest)
    assert schema_of(grammar_of(request, RequestLimits(), formats_of(request), forced)) == forced | LAYOUT
    whole = msgspec.convert(fields | {"guided_regex": "a"}, CompletionRequest)
    with pytest.raises(ServingError, match="'guided_regex' cannot be combined with 'tool_choice'"):
        grammar_of(whole, RequestLimits(), formats_of(whole), forced)


def test_calls_may_take_the_place_of_text_but_not_of_a_whole_answer() -> None:
    calls = GrammarCalls("<tool_call>")
    for fields, expected in (
        ({"response_format": {"type": "json_object"}}, calls),
        ({"structured_outputs": {"json": {"type": "object"}}}, None),
        ({"guided_regex": "a"}, None),
    ):
        request = msgspec.convert({"prompt": "x"} | fields, CompletionRequest)
        found = grammar_of(request, RequestLimits(), formats_of(request), calls=calls)
        assert found is not None
        assert found.calls == expected


def test_a_schema_that_is_too_long_is_refused_before_it_is_walked() -> None:
    """Walking two megabytes of it would delay all requests."""
    schema = {"enum": [[1]] * 1000 + ["x" * 41]}
    with pytest.raises(ServingError, match="characters; the limit is 400"):
        grammar(guided_json=schema)


def test_a_schema_of_tools_that_is_too_long_is_refused_by_name() -> None:
    request = CompletionRequest(prompt="x")
    with pytest.raises(ServingError, match="characters in the schema of 'tools'; the limit is 400"):
        grammar_of(request, RequestLimits(max_schema_chars=400), [], {"enum": list(range(400))})


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", "cannot be combined"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
            "cannot be combined with 'response_format'",
        ),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a"}, "allowed_token_ids": [1]}, "allowed_token_ids", "cannot be combined"),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
            "is only for 'structured_outputs.json'",
        ),
        ({"guided_whitespace_pattern": "_?"}, "guided_whitespace_pattern", "is only for 'guided_json'"),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True, "whitespace_pattern": "_?"}},
            "structured_outputs.whitespace_pattern",
            "cannot be combined with 'structured_outputs.disable_any_whitespace'",
        ),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "cannot be combined with 'guided_regex'"),
        ({"guided_json": {"multipleOf": 99_991}}, "guided_json", "multipleOf"),
        ({"guided_json": "{"}, "guided_json", "is not a JSON schema"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "is empty"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "is empty"),
        ({"structured_outputs": {"regex": "a" * 41}}, "structured_outputs.regex", "has 41 characters; the limit is 40"),
        ({"structured_outputs": {"grammar": "a" * 41}}, "structured_outputs.grammar", "the limit is 40"),
        ({"structured_outputs": {"choice": ["a" * 400]}}, "structured_outputs.choice", "has 404 characters"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "is not a JSON schema"),
        ({"structured_outputs": {"json": "[1]"}}, "structured_outputs.json", "is not a JSON schema"),
        ({"structured_outputs": {"structural_tag": "x", "regex": "a"}}, "structured_outputs.structural_tag", "support"),
        ({"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}}, None, "not supported"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], param: str | None, message: str) -> None:
    with pytest.raises(ServingError, match=message) as refused:
        grammar(**fields)
    assert param is None or refused.value.param == param
