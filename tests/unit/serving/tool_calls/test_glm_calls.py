import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraserve.serving.text.found import CallArguments, CallBegun
from loraserve.serving.tool_calls.around import MAX_AROUND
from loraserve.serving.tool_calls.formats import ToolCallFormat
from loraserve.serving.tool_calls.parser import call_parser
from loraserve.serving.tool_calls.tagged_calls import MAX_NAME

PROPERTIES: dict[str, Any] = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "options": {"type": "object"},
    "any": {"description": "No type."},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": PROPERTIES}}},
    {"type": "function", "function": {"name": "now"}},
]
Calls = list[tuple[str, str]]


def parse(*pieces: str) -> tuple[str, Calls]:
    """The content, and the name and arguments of each call."""
    parser = call_parser(ToolCallFormat.GLM45, TOOLS)
    content, calls = "", Calls()
    for part in [*(part for piece in pieces for part in parser.feed(piece)), *parser.finish()]:
        match part:
            case str():
                content += part
            case CallBegun(name):
                calls.append((name, ""))
            case CallArguments(text):
                assert text
                calls[-1] = calls[-1][0], calls[-1][1] + text
    return content, calls


def written(between: str, **parameters: str) -> str:
    tags = [
        f"<arg_key>{name}</arg_key>{between}<arg_value>{text}</arg_value>{between}" for name, text in parameters.items()
    ]
    return f"<tool_call>weather{between}{''.join(tags)}</tool_call>"


def parsed(text: str) -> Calls:
    """Of a text that consists of calls, whole and by character."""
    content, calls = parse(text)
    assert parse(*text) == (content, calls)
    assert content == ""
    return calls


@pytest.mark.parametrize("between", ["", "\n", " \n  "])
def test_a_call_is_parsed_with_and_without_line_breaks(between: str) -> None:
    """GLM-4.5 writes them, GLM-4.7 does not."""
    ((name, arguments),) = parsed(f"\n{written(between, city='Paris', days='3')}\n")
    assert (name, json.loads(arguments)) == ("weather", {"city": "Paris", "days": 3})


def test_a_call_without_parameters_is_parsed() -> None:
    for text in ("<tool_call>now</tool_call>", "<tool_call>now\n</tool_call>", "<tool_call>\nnow</tool_call>"):
        assert parsed(text) == [("now", "{}")]


def test_several_calls_are_parsed() -> None:
    text = f"{written('', city='Paris')}\n<tool_call>now</tool_call>{written('', days='2')}"
    assert parsed(text) == [("weather", '{"city": "Paris"}'), ("now", "{}"), ("weather", '{"days": 2}')]


def test_content_before_and_after_calls_is_kept() -> None:
    assert parse(f"I look.\n{written('', city='Bonn')} Done.") == ("I look.\n Done.", [("weather", '{"city": "Bonn"}')])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>weather",
        "<tool_call>weather\n",
        "<tool_call>weather\n<arg",
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        "<tool_call>two words\n<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
        "<tool_call>weather is a word</tool_call>",
        "<tool_call>weather\nis a word</tool_call>",
        "<tool_call>weather<b>bold</b>",
        f"<tool_call>{'n' * MAX_AROUND}\n</tool_call>",
        f"<tool_call>{' ' * (MAX_AROUND + 1)}now</tool_call>",
        f"<tool_call>now{' ' * (MAX_AROUND + 1)}</tool_call>",
        f"<tool_call>now\n{' ' * MAX_AROUND}</tool_call>",
        "<tool_call>now" + "\n" * 100_000,
        "a < b <tool_cal",
    ],
)
def test_text_that_is_not_a_call_is_content(text: str) -> None:
    assert parse(text) == parse(*text) == (text, [])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("</arg_key> < & \n", "</arg_key> < & \n"),
        ("\n two lines\n", "\n two lines\n"),
        ("3", "3"),
        ("", ""),
    ],
)
def test_a_string_is_the_text_between_its_tags(text: str, value: str) -> None:
    ((_, arguments),) = parsed(written("\n", city=text))
    assert json.loads(arguments) == {"city": value}


def test_a_value_is_converted_to_the_declared_type() -> None:
    ((_, arguments),) = parsed(written("", days=" 3 ", options='{"a": [1, "</arg_value>"]}', any="3"))
    assert json.loads(arguments) == {"days": 3, "options": {"a": [1, "</arg_value>"]}, "any": "3"}


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("<tool_call>weather<arg_key>city</arg_key><arg_value>Par", '{"city": "Par'),
        ("<tool_call>weather<arg_key>days</arg_key><arg_value>1", '{"days": 1'),
        ("<tool_call>weather<arg_key>city</arg_key>", "{"),
        ("<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value>", '{"city": "Paris"'),
        ("<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_ca", '{"city": "Paris"'),
    ],
)
def test_a_call_that_is_cut_off_has_unfinished_arguments(text: str, arguments: str) -> None:
    assert parsed(text) == [("weather", arguments)]


@pytest.mark.parametrize(
    "rest",
    [
        "text",
        "<arg_key>two\nlines</arg_key><arg_value>1</arg_value>",
        "<arg_key>a</arg_key>no<arg_value>1</arg_value>",
        f"<arg_key>{'n' * (MAX_NAME + 2 * MAX_AROUND)}</arg_key><arg_value>1</arg_value>",
        "<arg_key>a<b",
        "<arg_key>a<b</arg_key>",
        "<arg_key></arg_key>",
        f"<arg_key>a</arg_key>{' ' * (MAX_AROUND + 1)}<arg_value>1</arg_value>",
    ],
)
def test_other_text_ends_a_call_and_is_content(rest: str) -> None:
    text = f"<tool_call>weather<arg_key>days</arg_key><arg_value>1</arg_value>{rest}"
    assert parse(text) == parse(*text) == (rest, [("weather", '{"days": 1}')])


PARTS = [
    "<tool_call>",
    "</tool_call>",
    "weather",
    "now",
    "<arg_key>",
    "city",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
]


@settings(max_examples=500)
@given(st.lists(st.sampled_from([*PARTS, *"\n <ax/"]), max_size=16).map("".join), st.data())
def test_the_result_does_not_depend_on_how_the_text_is_split(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(*pieces) == parse(text)
