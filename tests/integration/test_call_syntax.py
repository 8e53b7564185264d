"""Forced calls in a format's own syntax: the grammars are compiled by the engine, and what they allow is read back."""

import json
import random
from typing import Any

import numpy as np
import pytest

from loraserve.api.chat.call_syntax import call_syntax
from loraserve.api.chat.forced_calls import schema_of_arguments
from loraserve.engine.grammars.compiler import Grammars
from loraserve.engine.grammars.matcher import OutputMatcher
from loraserve.engine.request import Grammar, GrammarKind, GrammarMark
from loraserve.serving.text.conversation import JsonObject
from loraserve.serving.text.found import CallArguments, CallBegun
from loraserve.serving.tool_calls.formats import SYNTAXES, ToolCallFormat
from loraserve.serving.tool_calls.parser import call_parser

QWEN, LFM2 = ToolCallFormat.QWEN3_CODER, ToolCallFormat.LFM2
CHARS = "".join(map(chr, range(32, 127))) + "\n"
MARKS = [mark for name in (QWEN, LFM2) for mark in (SYNTAXES[name].opening, SYNTAXES[name].closing)]
END = len(CHARS) + len(MARKS)
TEXTS = [*CHARS, *MARKS, ""]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    """Compiles for a tokenizer of characters and marks; LFM2's are special tokens, as in its models."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    vocab = {{" ": "Ġ", "\n": "Ċ"}.get(char, char): index for index, char in enumerate(CHARS)}
    usual = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = {mark: len(CHARS) + index for index, mark in enumerate([*MARKS, "<end>"])}
    tokens = [{"id": index, "content": text, "special": "_call>" not in text} | usual for text, index in added.items()]
    model = {"type": "BPE", "vocab": vocab | added, "merges": []}
    tokenizer = {"version": "1.0", "added_tokens": tokens, "model": model}
    return Grammars(json.dumps(tokenizer | {"pre_tokenizer": byte_level, "decoder": byte_level}), [END])


def tool(name: str, *required: str, **properties: Any) -> JsonObject:
    parameters = {"type": "object", "properties": properties, "required": [*required], "$defs": DEFINITIONS}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


DEFINITIONS: JsonObject = {
    "Digit": {"type": "integer", "minimum": 0, "maximum": 9},
    "Unit": {"enum": ["C", "F", None]},
}
WEATHER = tool(
    "get_weather",
    "city",
    "days",
    city={"type": "string", "description": "Where."},
    days={"$ref": "#/$defs/Digit"},
    unit={"$ref": "#/$defs/Unit"},
    flag={"type": "boolean"},
)
OPTIONAL = tool(
    "optional",
    a={"type": "string", "minLength": 1, "maxLength": 3},
    b={"type": "array", "items": {"$ref": "#/$defs/Digit"}, "maxItems": 2},
    c={"anyOf": [{"type": "string"}, {"type": "null"}]},
    d={"type": "object", "properties": {"x": {"enum": ["</parameter>"]}}, "required": ["x"]}
    | {"additionalProperties": False},
)
NOW: JsonObject = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, OPTIONAL, NOW]


def matcher_of(
    grammars: Grammars, call_format: ToolCallFormat, tools: list[JsonObject], max_calls: int | None = None
) -> OutputMatcher:
    text = call_syntax(call_format, tools, max_calls)
    assert text is not None
    syntax = SYNTAXES[call_format]
    marks = tuple(GrammarMark(mark, len(CHARS) + MARKS.index(mark)) for mark in (syntax.opening, syntax.closing))
    if call_format is QWEN:
        marks = tuple(GrammarMark(mark.text) for mark in marks)
    return grammars.compile(Grammar(GrammarKind.LARK, text, marks=marks)).result().copy()


def ids(text: str) -> list[int]:
    """The marks of LFM2 are one token each."""
    found: list[int] = []
    while text:
        mark = next((mark for mark in MARKS[2:] if text.startswith(mark)), text[0])
        found.append(TEXTS.index(mark))
        text = text[len(mark) :]
    return found


def takes(matcher: OutputMatcher, text: str) -> bool:
    """Whether it is a whole output."""
    if not all(matcher.take(token_id) for token_id in ids(text)):
        return False
    mask = matcher.mask()
    return mask is not None and bool(np.unpackbits(mask, bitorder="little")[END])


def read(call_format: ToolCallFormat, text: str, tools: list[JsonObject]) -> list[tuple[str, str]]:
    parser = call_parser(call_format, tools)
    calls: list[tuple[str, str]] = []
    for part in [*parser.feed(text), *parser.finish()]:
        match part:
            case CallBegun(name):
                calls.append((name, ""))
            case CallArguments(arguments):
                calls[-1] = calls[-1][0], calls[-1][1] + arguments
            case str():
                raise AssertionError(part)
    return calls


def tagged(name: str, **parameters: str) -> str:
    tags = "".join(f"<parameter={each}>\n{text}\n</parameter>\n" for each, text in parameters.items())
    return f"<tool_call>\n<function={name}>\n{tags}</function>\n</tool_call>"


def python(*calls: str) -> str:
    return f"<|tool_call_start|>[{', '.join(calls)}]<|tool_call_end|>"


ALLOWED = [
    (QWEN, tagged("now")),
    (QWEN, f"\n\n{tagged('now')}\n{tagged('now')}"),
    (QWEN, tagged("get_weather", city="a <b>\n</param\n", days="9", unit="F", flag="true")),
    (QWEN, tagged("get_weather", city="", days="0", unit="null")),
    (QWEN, tagged("optional")),
    (QWEN, tagged("optional", a="\n\n", c="null", d='{"x": "</parameter>"}')),
    (QWEN, tagged("optional", b="[1, 2]", c="x")),
    (LFM2, python("now()")),
    (LFM2, f"\n{python('now()', 'now()')}"),
    (LFM2, python(r'get_weather(city="a\n\"", days=9, unit="F", flag=True)')),
    (LFM2, python('get_weather(city="", days=0, flag=False)')),
    (LFM2, python("optional()", "optional(b=[1, 2], c=null)")),
    (LFM2, python('optional(a="abc", d={"x": "</parameter>"})')),
    (LFM2, python('optional(c="<|tool_call")')),
]
REFUSED = [
    (QWEN, "Hm."),
    (QWEN, tagged("other")),
    (QWEN, tagged("now", x="1")),
    (QWEN, tagged("get_weather", city="a")),
    (QWEN, tagged("get_weather", days="1", city="a")),
    (QWEN, tagged("get_weather", city="a", days="10")),
    (QWEN, tagged("get_weather", city="a", days="1", unit="K")),
    (QWEN, tagged("get_weather", city="a", days="1", unit="")),
    (QWEN, tagged("get_weather", city="a</parameter>", days="1")),
    (QWEN, tagged("get_weather", city="a\n</function>\n</tool_call>", days="1")),
    (QWEN, tagged("optional", a="")),
    (QWEN, tagged("optional", a="abcd")),
    (QWEN, tagged("optional", b="[1, 10]")),
    (LFM2, "Hm."),
    (LFM2, python()),
    (LFM2, python("other()")),
    (LFM2, python('get_weather(city="a")')),
    (LFM2, python('get_weather(days=1, city="a")')),
    (LFM2, python('get_weather(city="a", days=1, flag=true)')),
    (LFM2, python('optional(a="")')),
    (LFM2, python("optional(, c=null)")),
]


@pytest.mark.parametrize(("call_format", "text"), ALLOWED)
def test_calls_in_the_formats_syntax_are_allowed(grammars: Grammars, call_format: ToolCallFormat, text: str) -> None:
    assert takes(matcher_of(grammars, call_format, TOOLS), text)


@pytest.mark.parametrize(("call_format", "text"), REFUSED)
def test_calls_that_break_a_schema_are_not(grammars: Grammars, call_format: ToolCallFormat, text: str) -> None:
    assert not takes(matcher_of(grammars, call_format, TOOLS), text)


@pytest.mark.parametrize(
    ("call_format", "two"), [(QWEN, f"{tagged('now')}\n{tagged('now')}"), (LFM2, python("now()", "now()"))]
)
def test_there_can_be_a_limit_of_one_call(grammars: Grammars, call_format: ToolCallFormat, two: str) -> None:
    assert takes(matcher_of(grammars, call_format, [NOW]), two)
    assert not takes(matcher_of(grammars, call_format, [NOW], 1), two)


def random_output(matcher: OutputMatcher, rng: random.Random, closing: str) -> str:
    """Prefers tokens that end values, and after a while ends texts by `closing`."""
    text = ""
    while True:
        mask = matcher.mask()
        assert mask is not None
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        if END in allowed:
            return text
        hurried = [index for index in allowed if TEXTS[index] in [*'\n<"}])/']]
        token_id = rng.choice(hurried if hurried and rng.random() < 0.6 else allowed)
        if len(text) > 150 and len(allowed) > 50:
            num_closed = max(length for length in range(len(closing)) if text.endswith(closing[:length]))
            token_id = TEXTS.index(closing[num_closed])
        assert matcher.take(token_id), matcher.error
        text += TEXTS[token_id]


@pytest.mark.parametrize("call_format", [QWEN, LFM2])
@pytest.mark.parametrize("seed", range(12))
def test_any_output_is_read_as_a_call_that_follows_its_schema(
    grammars: Grammars, call_format: ToolCallFormat, seed: int
) -> None:
    closing = "\n</parameter>\n" if call_format is QWEN else '"'
    text = random_output(matcher_of(grammars, call_format, TOOLS, 1), random.Random(seed), closing)
    ((name, arguments),) = read(call_format, text, TOOLS)
    schema = next(schema_of_arguments(each) for each in TOOLS if each["function"]["name"] == name)
    assert takes(grammars.compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))).result().copy(), arguments)


@pytest.mark.parametrize("call_format", [QWEN, LFM2])
@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"a": {}}, "minProperties": 1},
        {"type": "object", "properties": {"a": {}}, "required": ["b"]},
        {"type": "object", "properties": {"a<b": {}}},
        {"type": "object", "properties": {"a": False}},
        {"type": "object", "properties": {"a": {"type": "array", "items": {"$ref": "#"}}}},
        {"anyOf": [{"properties": {"a": {}}}]},
    ],
)
def test_schemas_that_no_syntax_expresses_have_no_grammar(call_format: ToolCallFormat, parameters: JsonObject) -> None:
    other = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    assert call_syntax(call_format, [NOW, other], None) is None


@pytest.mark.parametrize(
    ("schema", "is_tagged"),
    [
        ({}, True),
        (True, True),
        ({"type": ["string", "integer"]}, True),
        ({"type": ["string", "null"], "enum": ["a", None]}, True),
        ({"type": ["integer", "null"], "enum": [1, None]}, True),
        ({"const": "a", "type": "string"}, True),
        ({"type": "string", "format": "password"}, True),
        ({"type": "string", "pattern": "^a"}, False),
        ({"type": "string", "format": "date"}, False),
        ({"type": "string", "maxLength": 10_000}, False),
        ({"enum": ["null", None]}, False),
        ({"enum": ["1", 1]}, False),
        ({"enum": ["</parameter>"]}, False),
        ({"anyOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}]}, False),
        ({"anyOf": [{"type": "integer"}, {"minimum": 3}]}, False),
        ({"allOf": [{"type": "string"}]}, False),
        ({"$ref": "#/$defs/Missing"}, False),
    ],
)
def test_only_texts_that_are_converted_to_what_the_schema_demands_are_tagged(schema: Any, is_tagged: bool) -> None:
    assert (call_syntax(QWEN, [tool("f", x=schema)], None) is not None) == is_tagged


def test_other_formats_have_no_syntax_of_their_own() -> None:
    assert call_syntax(ToolCallFormat.HERMES, TOOLS, None) is None
