import json
import string
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraserve.serving.text.found import CallArguments, CallBegun, Found
from loraserve.serving.tool_calls.around import MAX_AROUND, CallParser
from loraserve.serving.tool_calls.formats import ToolCallFormat
from loraserve.serving.tool_calls.json_extent import Extent
from loraserve.serving.tool_calls.parser import call_parser
from loraserve.serving.tool_calls.tagged_calls import MAX_NAME

PROPERTIES: dict[str, Any] = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "options": {"type": "object"},
    "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "any": {"description": "No type."},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": PROPERTIES}}},
    {"type": "function", "function": {"name": "now"}},
]
NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"


class Call(NamedTuple):
    name: str
    arguments: str


def parser() -> CallParser:
    return call_parser(ToolCallFormat.QWEN3_CODER, TOOLS)


def parse(*pieces: str) -> tuple[str, list[Call]]:
    parser = call_parser(ToolCallFormat.QWEN3_CODER, TOOLS)
    content, calls = "", list[Call]()
    for part in [*(part for piece in pieces for part in parser.feed(piece)), *parser.finish()]:
        match part:
            case str():
                content += part
            case CallBegun(name):
                calls.append(Call(name, ""))
            case CallArguments(text):
                assert text
                calls[-1] = Call(calls[-1].name, calls[-1].arguments + text)
    return content, calls


def written(**parameters: str) -> str:
    """As Qwen's chat templates show calls."""
    tags = "".join(f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in parameters.items())
    return f"<tool_call>\n<function=weather>\n{tags}</function>\n</tool_call>"


def parsed(text: str) -> list[Any]:
    """The arguments of a text that consists of calls, whole and by character."""
    content, calls = parse(text)
    assert parse(*text) == (content, calls)
    assert content == ""
    return [json.loads(call.arguments) for call in calls]


@pytest.mark.parametrize(
    "text",
    [
        written(city="Paris", days="3"),
        f"\n\n{written(city='Paris', days='3')}\n",
        written(city="Paris", days="3").removesuffix("\n</tool_call>"),
        written(city="Paris", days="3").removesuffix("ol_call>"),
        written(city="Paris", days="3").replace("\n", ""),
        written(city="Paris", days="3").replace("</function>\n", " ").replace("=weather", "= weather "),
        written(city="Paris", days="3").replace("3\n</parameter>", "3"),
    ],
)
def test_one_call_is_parsed(text: str) -> None:
    assert parse(text) == parse(*text) == ("", [Call("weather", '{"city": "Paris", "days": 3}')])


@pytest.mark.parametrize("between", ["", "\n", "\n\n ", "</tool_call>\n<tool_call>"])
def test_several_calls_are_parsed(between: str) -> None:
    text = written(days="1") + between + NOW + between + written(days="2")
    text = text.replace("</tool_call></tool_call>", "</tool_call>").replace("<tool_call><tool_call>", "<tool_call>")
    calls = [Call("weather", '{"days": 1}'), Call("now", "{}"), Call("weather", '{"days": 2}')]
    assert parse(text) == parse(*text) == ("", calls)
    joined = "<tool_call>\n<function=now>\n</function>\n<function=now>\n</function>\n</tool_call>"
    assert parse(joined) == parse(*joined) == ("", [calls[1]] * 2)


def test_content_around_calls_is_kept_in_order() -> None:
    assert parser().feed(f"a < b {NOW}\n{NOW} b") == [
        "a < b ",
        *(CallBegun("now"), CallArguments("{"), CallArguments("}")),
        *(CallBegun("now"), CallArguments("{"), CallArguments("}")),
        " b",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Hello <b>.",
        "<tool",
        "<tool_call>",
        "<tool_call>\n<func",
        "<tool_call>\n<function=now",
        "<tool_call>\n<function=not a name>\n</function>\n</tool_call>",
        f"<tool_call>\n<function={'n' * 65}>\n</function>\n</tool_call>",
        f"<tool_call>\n<function={'n' * MAX_AROUND}",
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "<tool_call>" + " " * MAX_AROUND * 2 + "<function=now></function>",
        "<function=now>\n</function>",
    ],
)
def test_text_that_is_not_a_call_is_content(text: str) -> None:
    assert parse(text) == parse(*text) == (text, [])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "\n\n",
        " a \n b ",
        "null",
        '"quoted" \\n \\u1234',
        "日本語 🙂 é",
        "if a < b and c > d: <b>x</b> </param </parameters>",
        "<tool_call>\n<function=now>\n</function",
        "</function>",
        "<parameter=days>",
        "\x00\x1f\u2028",
    ],
)
def test_a_string_is_the_text_without_the_line_breaks_next_to_its_tags(text: str) -> None:
    assert parsed(written(city=text, days="3")) == [{"city": text, "days": 3}]
    assert parsed(written(unknown=text)) == [{"unknown": text}]


def test_a_value_is_converted_to_the_declared_type() -> None:
    text = written(days="-12", options='{"a": "</parameter>", "b": [1.0]}', unit="None", any="12")
    assert parsed(text) == [{"days": -12, "options": {"a": "</parameter>", "b": [1.0]}, "unit": None, "any": "12"}]
    assert parse(text)[1][0].arguments.count('{"a": "</parameter>", "b": [1.0]}') == 1
    assert parsed(written(days="many", options='["a</parameter', unit="C")) == [
        {"days": "many", "options": '["a</parameter', "unit": "C"}
    ]
    assert parsed(written(options="{'a': True}")) == [{"options": {"a": True}}]


def test_strings_are_emitted_as_they_arrive_and_other_values_once_they_are_complete() -> None:
    calls = parser()
    steps: list[tuple[str, list[Found]]] = [
        ("<tool_call>\n<function=weather", []),
        (">", [CallBegun("weather"), CallArguments("{")]),
        ("\n<parameter=ci", []),
        ("ty>", [CallArguments('"city": ')]),
        ("\n", [CallArguments('"')]),
        ('P"', [CallArguments('P\\"')]),
        ("\n</para", []),
        ("\n", [CallArguments("\\n</para")]),
        ("</parameter>", [CallArguments('"')]),
        ("\n<parameter=days>\n1", [CallArguments(', "days": ')]),
        ("2", []),
        ("\n</parameter>\n", [CallArguments("12")]),
    ]
    for text, found in steps:
        assert (text, calls.feed(text)) == (text, found)
    assert calls.arguments is Extent.OPEN
    assert calls.feed("</function>") == [CallArguments("}")]
    assert calls.arguments is None
    assert calls.feed("\n</tool_call>") == calls.finish() == []


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("\n", "{"),
        ("\n<param", "{"),
        ("\n<parameter=city>", '{"city": '),
        ("\n<parameter=city>\nPa\n</para", '{"city": "Pa'),
        ("\n<parameter=city>\nPa\n</parameter>\n", '{"city": "Pa"'),
        ("\n<parameter=days>\n1", '{"days": 1'),
        ('\n<parameter=options>\n{"a": [', '{"options": {"a": ['),
    ],
)
def test_a_call_that_is_cut_off_has_unfinished_arguments(text: str, arguments: str) -> None:
    text = f"<tool_call>\n<function=weather>{text}"
    assert parse(text) == parse(*text) == ("", [Call("weather", arguments)])
    calls = parser()
    calls.feed(text)
    assert calls.arguments is Extent.OPEN


@pytest.mark.parametrize(
    "rest", ['{"a": 1}', "text", "<parameter>", "<parameter=>", f"<parameter={'n' * 2 * MAX_NAME}>"]
)
def test_other_text_ends_a_call_and_is_content(rest: str) -> None:
    text = f"<tool_call><function=now>\n{rest}</function></tool_call>{NOW}"
    assert parse(text) == parse(*text) == (f"{rest}</function></tool_call>", [Call("now", "{}")] * 2)


FRAGMENTS = st.sampled_from(
    [
        *(written(city="a", days="1"), NOW, "<tool_call>", "</tool_call>", "<function=now>", "<function=weather>"),
        *("</function>", "<parameter=city>", "<parameter=days>", "<parameter=options>", "</parameter>", "\n", " "),
        *('{"a": "', '"', "\\", "[", "}", "<", ">", "12", "null", "<parameter=", "x" * MAX_AROUND, " " * MAX_AROUND),
    ]
)
TEXTS = st.lists(st.one_of(FRAGMENTS, st.text(max_size=4)), max_size=14).map("".join)


@given(text=TEXTS, data=st.data())
def test_the_result_does_not_depend_on_how_the_text_is_split(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse(text)
    assert parse(*pieces) == whole
    assert parse(*text) == whole
    if not whole[1]:
        assert whole[0] == text


NAMES = st.text(string.ascii_letters + string.digits + "_-.", min_size=1, max_size=8)
VALUES = st.text().filter(lambda text: "</parameter>" not in text and "</function>" not in text)


@given(st.dictionaries(NAMES.filter(lambda name: name not in PROPERTIES), VALUES, max_size=3))
def test_any_texts_are_found_as_they_were_written(parameters: dict[str, str]) -> None:
    assert parsed(written(**parameters)) == [parameters]
