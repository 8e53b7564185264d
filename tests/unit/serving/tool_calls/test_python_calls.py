import json
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraserve.serving.text.found import CallArguments, CallBegun
from loraserve.serving.tool_calls.around import MAX_AROUND, CallParser
from loraserve.serving.tool_calls.formats import ToolCallFormat
from loraserve.serving.tool_calls.json_extent import Extent
from loraserve.serving.tool_calls.parser import call_parser

START, END = "<|tool_call_start|>", "<|tool_call_end|>"


class Call(NamedTuple):
    name: str
    arguments: str


ADD = Call("add", '{"a": 1}')
SUB = Call("sub", '{"a": {"b": ["}", ")\\"]"]}}')
BOTH = """[add(a=1), sub(a={'b': ["}", ')"]']})]"""


def parser() -> CallParser:
    return call_parser(ToolCallFormat.LFM2, [])


def parse(*pieces: str) -> tuple[str, list[Call]]:
    calls_of = parser()
    content, calls = "", list[Call]()
    for part in [*(part for piece in pieces for part in calls_of.feed(piece)), *calls_of.finish()]:
        match part:
            case str():
                content += part
            case CallBegun(name):
                calls.append(Call(name, ""))
            case CallArguments(text):
                calls[-1] = Call(calls[-1].name, calls[-1].arguments + text)
    return content, calls


@pytest.mark.parametrize(
    "text",
    [
        f"{START}[add(a=1)]{END}",
        f"\n{START} [ add ( a = 1 , ) , ]\n{END}\n",
        f"{START}[add(a=1)]",
        f"{START}[add(a=1)",
        f"{START}[add(a=1), ",
        f"{START}[add(a=1)]<|tool",
    ],
)
def test_one_call_is_parsed(text: str) -> None:
    assert parse(text) == parse(*text) == ("", [ADD])


@pytest.mark.parametrize(
    "text",
    [
        f"{START}{BOTH}{END}",
        f"{START}[add(a=1)]{END}\n{START}[{BOTH[11:]}{END}",
        f"{START}{BOTH.replace(', s', 's')}{END}",
    ],
)
def test_several_calls_are_parsed(text: str) -> None:
    assert parse(text) == parse(*text) == ("", [ADD, SUB])


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ("", {}),
        ("s=\"Zürich 🙂\", t='it\\'s <b>', u=''", {"s": "Zürich 🙂", "t": "it's <b>", "u": ""}),
        ("a=True, b=None, c=false, d=null", {"a": True, "b": None, "c": False, "d": None}),
        ("a=-1.5, b=[1, (2, 3)], c={'x': {}}", {"a": -1.5, "b": [1, [2, 3]], "c": {"x": {}}}),
        ("class='A', naïve=1", {"class": "A", "naïve": 1}),
        ("s='line\nline'", {"s": "line\nline"}),
    ],
)
def test_arguments_become_json(arguments: str, values: dict[str, Any]) -> None:
    text = f"{START}[f({arguments})]{END}"
    content, (call,) = parse(text)
    assert (content, call.name, json.loads(call.arguments)) == ("", "f", values)
    assert parse(*text) == (content, [call])


@pytest.mark.parametrize(
    "text",
    [
        *("", "Hello [x].", "<|tool_call", "[add(a=1)]", START, f"{START}[", f"{START}[add(a=1", f"{START}[]{END}"),
        f"{START}add(a=1){END}",
        f"{START}[add(1)]{END}",
        f"{START}[add(a=b)]{END}",
        f"{START}[add(a=1, a=2)]{END}",
        f"{START}[add(a=f(1))]{END}",
        f"{START}[add(a=1 + 1)]{END}",
        f"{START}[add(a=1]){END}",
        f"{START}[not a name(a=1)]{END}",
        f"{START}[os.system(a=1)]{END}",
        f"{START}[add(a='it's')]{END} then.",
        f'{START}[{{"name": "add", "arguments": {{}}}}]{END}',
        f"{START}{' ' * MAX_AROUND}[add(a=1)]{END}",
        f"{START}[{'x' * MAX_AROUND}(a=1)]{END}",
        f"{START}[add(a={'[' * 50}{']' * 50})]{END}",
        f"{START}[add(a={'[' * 50_000}",
    ],
)  # fmt: skip
def test_text_that_is_not_a_call_is_content(text: str) -> None:
    assert parse(text) == parse(*text) == (text, [])


@pytest.mark.parametrize(
    ("rest", "content"),
    [
        (f", f(x)]{END}.", f", f(x)]{END}."),
        (", f(x=1", ", f(x=1"),
        (f"]{END} Done.", " Done."),
        ("] Done.", " Done."),
        (f", text]{END}", f", text]{END}"),
    ],
)
def test_text_after_a_call_that_is_not_one_is_content(rest: str, content: str) -> None:
    text = f"Let me see. {START}[add(a=1){rest}"
    assert parse(text) == parse(*text) == (f"Let me see. {content}", [ADD])


def test_a_call_is_emitted_once_it_is_complete() -> None:
    calls = parser()
    assert calls.feed(f"Hm. {START[:5]}") == ["Hm. "]
    assert calls.feed(f"{START[5:]}[add(a=") == []
    assert calls.arguments is Extent.OPEN
    assert calls.feed("1)") == [CallBegun("add"), CallArguments('{"a": 1}')]
    assert calls.arguments is None
    assert calls.feed(f", sub()]{END}") == [CallBegun("sub"), CallArguments("{}")]
    assert calls.feed(" b") == [" b"]
    assert calls.finish() == []


FRAGMENTS = st.sampled_from(
    [
        *(
            START,
            END,
            f"{START}{BOTH}{END}",
            "[",
            "]",
            "add(",
            "a=",
            "1",
            ")",
            ", ",
            "{",
            "}",
            '"',
            "'",
            "\\",
            " ",
            "\n",
        ),
        *("'x'", "b=[", ": ", "<|tool_call_", "x" * MAX_AROUND, " " * MAX_AROUND),
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


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(calls=st.lists(st.dictionaries(st.from_regex("[a-z_]{1,8}", fullmatch=True), VALUES, max_size=3), min_size=1))
def test_any_calls_are_found_as_python_writes_them(calls: list[dict[str, Any]]) -> None:
    listed = [f"f({', '.join(f'{name}={value!r}' for name, value in call.items())})" for call in calls]
    content, found = parse(*f"{START}[{', '.join(listed)}]{END}")
    assert content == ""
    assert [json.loads(call.arguments) for call in found] == calls
