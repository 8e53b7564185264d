import json
import string
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraserve.serving.text.found import CallArguments, CallBegun
from loraserve.serving.tool_calls.around import MAX_AROUND
from loraserve.serving.tool_calls.call_object import MAX_BEGINNING
from loraserve.serving.tool_calls.formats import LIST_OF_CALLS, SYNTAXES, CallSyntax, ToolCallFormat
from loraserve.serving.tool_calls.json_calls import JsonCallParser


class Call(NamedTuple):
    name: str
    arguments: str


FORMATS = HERMES, LLAMA, MISTRAL = ToolCallFormat.HERMES, ToolCallFormat.LLAMA3_JSON, ToolCallFormat.MISTRAL
ADD = Call("add", '{"a": 1}')
SUB = Call("sub", '{"a": {"b": ["}", "\\"]"]}}')


def parse(call_format: ToolCallFormat, *pieces: str) -> tuple[str, list[Call]]:
    return parse_by(SYNTAXES[call_format], *pieces)


def parse_by(syntax: CallSyntax, *pieces: str) -> tuple[str, list[Call]]:
    parser = JsonCallParser(syntax)
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


def written(call_format: ToolCallFormat, call: Call) -> str:
    match call_format:
        case ToolCallFormat.HERMES:
            return f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>'
        case ToolCallFormat.LLAMA3_JSON:
            return f'<|python_tag|>{{"name": "{call.name}", "parameters": {call.arguments}}}'
        case _:
            return f'[TOOL_CALLS] [{{"name": "{call.name}", "arguments": {call.arguments}}}]'


@pytest.mark.parametrize(
    ("call_format", "text"),
    [
        (HERMES, '<tool_call>{"name":"add","arguments":{"a": 1}}</tool_call>'),
        (HERMES, '\n<tool_call>\n{"arguments": {"a": 1}, "name": "add"}\n</tool_call>\n'),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1}}'),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1}}\n</tool'),
        (LLAMA, '{"name": "add", "parameters": {"a": 1}}'),
        (LLAMA, ' {"type": "function", "name": "add", "arguments": {"a": 1}} '),
        (LLAMA, '<|python_tag|>{"name": "add", "parameters": {"a": 1}}'),
        (MISTRAL, '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]'),
        (MISTRAL, '[TOOL_CALLS] [ {"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"} ]\n'),
        (MISTRAL, '[TOOL_CALLS]add{"a": 1}'),
        (MISTRAL, '[TOOL_CALLS]add[ARGS]{"a": 1}'),
        (MISTRAL, '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1}'),
    ],
)
def test_one_call_is_parsed(call_format: ToolCallFormat, text: str) -> None:
    assert parse(call_format, text) == ("", [ADD])


@pytest.mark.parametrize(
    ("call_format", "text"),
    [
        (HERMES, f"{written(HERMES, ADD)}\n{written(HERMES, SUB)}"),
        (LLAMA, f'{{"name": "add", "parameters": {{"a": 1}}}}; {{"name": "sub", "parameters": {SUB.arguments}}}'),
        (LLAMA, f"{written(LLAMA, ADD)}{written(LLAMA, SUB)};"),
        (MISTRAL, f'{written(MISTRAL, ADD)[:-1]}, {{"name": "sub", "arguments": {SUB.arguments}}}]'),
        (MISTRAL, f'[TOOL_CALLS]add{{"a": 1}}[TOOL_CALLS]sub{SUB.arguments}'),
    ],
)
def test_several_calls_are_parsed(call_format: ToolCallFormat, text: str) -> None:
    assert parse(call_format, text) == ("", [ADD, SUB])


@pytest.mark.parametrize("call_format", FORMATS)
def test_content_around_calls_is_kept(call_format: ToolCallFormat) -> None:
    text = f" Let me see.\n{written(call_format, ADD)}\nDone <b> [x] {{y}}."
    assert parse(call_format, text) == (" Let me see.\n\nDone <b> [x] {y}.", [ADD])


@pytest.mark.parametrize("call_format", FORMATS)
@pytest.mark.parametrize(
    "text", ["", " \n", "Hello.", "a < b [c] {d}", "\n{", "<tool", "[TOOL_CALLS", "<|python_tag|>", '{"answer": [1]}']
)
def test_an_answer_without_calls_is_unchanged(call_format: ToolCallFormat, text: str) -> None:
    assert parse(call_format, text) == (text, [])


@pytest.mark.parametrize(
    ("call_format", "text"),
    [
        (HERMES, "<tool_call></tool_call>"),
        (HERMES, '<tool_call>add{"name": "add", "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        (HERMES, '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>'),
        (HERMES, '<tool_call>{"name": "add"}</tool_call>'),
        (HERMES, '<tool_call>{"name": "not a name", "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": 1, "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "add, "arguments": {}}</tool_call>'),
        (HERMES, "<tool_call>{'name': 'add', 'arguments': {}}</tool_call>"),
        (HERMES, '<tool_call>{"name": "add", "arguments": {'[:-1]),
        (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "add"'),
        (HERMES, '<tool_call>{"arguments": {"a": 1,}, "name": "add"}</tool_call>'),
        (HERMES, "<tool_call>" + " " * MAX_AROUND + '{"name": "add", "arguments": {}}</tool_call>'),
        (LLAMA, '{"name": "Ada", "age": 36}'),
        (LLAMA, '<|python_tag|>brave_search.call(query="x")'),
        (LLAMA, 'Sure: {"name": "add", "parameters": {}}'),
        (MISTRAL, "[TOOL_CALLS] []"),
        (MISTRAL, '[TOOL_CALLS]not a name{"a": 1}'),
        (MISTRAL, 'add{"a": 1}'),
    ],
)
def test_text_that_is_not_a_call_is_content(call_format: ToolCallFormat, text: str) -> None:
    assert parse(call_format, text) == (text, [])
    assert parse(call_format, *text) == (text, [])


@pytest.mark.parametrize(
    ("call_format", "text", "arguments", "content"),
    [
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a', '{"a', ""),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1', '{"a": 1', ""),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1} ', '{"a": 1}', ""),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', '{"a": 1}', ""),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1}} and</tool_call>', '{"a": 1}', " and</tool_call>"),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1} and}</tool_call>', '{"a": 1}', " and}</tool_call>"),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1}, "b": [1', '{"a": 1}', ', "b": [1'),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": oh}}</tool_call>.', '{"a": oh}}', "."),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": "\n"}}</tool_ca', '{"a": "\n"}}</tool_ca', ""),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a" 1}}</tool_call>', '{"a" 1}', ""),
        (
            HERMES,
            '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 40 + "]" * 40 + "}}</tool_call>",
            '{"a": ' + "[" * 40 + "]" * 40 + "}",
            "",
        ),
        (MISTRAL, '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, 1]', '{"a": 1}', ", 1]"),
        (MISTRAL, '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, ', '{"a": 1}', ""),
        (MISTRAL, "[TOOL_CALLS]add{a: 1}", "{a: 1}", ""),
        (LLAMA, '{"name": "add", "parameters": {"a": 1', '{"a": 1', ""),
    ],
)
def test_a_call_has_the_arguments_that_the_model_wrote(
    call_format: ToolCallFormat, text: str, arguments: str, content: str
) -> None:
    assert parse(call_format, text) == (content, [Call("add", arguments)])
    assert parse(call_format, *text) == (content, [Call("add", arguments)])


@pytest.mark.parametrize("malformed", ['{"a": 1}\n</tool_call>', '{"a": }}\n</tool_call>', '{"a": x\n'])
def test_a_call_after_a_malformed_one_is_found(malformed: str) -> None:
    content, calls = parse(HERMES, f'<tool_call>\n{{"name": "sub", "arguments": {malformed}\n{written(HERMES, ADD)}')
    assert (content, len(calls), calls[1]) == ("", 2, ADD)
    unopened = "The tag <tool_call> begins a call."
    assert parse(HERMES, f"{unopened} {written(HERMES, ADD)}") == (f"{unopened} ", [ADD])


@pytest.mark.parametrize("depth", [33, 10_000])
@pytest.mark.parametrize("call_format", FORMATS)
def test_arguments_of_any_depth_are_what_the_model_wrote(call_format: ToolCallFormat, depth: int) -> None:
    """Text after them is not part of them, and a call that follows is separate."""
    deep = Call("deep", '{"a":' * (depth - 1) + "{}" + "}" * (depth - 1))
    between = ";" if call_format is LLAMA else ""
    text = written(call_format, deep) + between + written(call_format, ADD)
    assert parse(call_format, text) == ("", [deep, ADD])
    assert parse(call_format, *text) == ("", [deep, ADD])


@pytest.mark.parametrize("depth", [40, 10_000])
def test_an_object_too_deep_to_read_whose_name_comes_last_is_content(depth: int) -> None:
    arguments = '{"a":' * (depth - 1) + "{}" + "}" * (depth - 1)
    text = f'<tool_call>{{"arguments": {arguments}, "name": "deep"}}</tool_call>'
    assert parse(HERMES, text) == (("", [Call("deep", arguments)]) if depth == 40 else (text, []))


def test_arguments_are_released_as_they_arrive() -> None:
    parser = JsonCallParser(SYNTAXES[HERMES])
    assert parser.feed('<tool_call>\n{"name": "add", "arguments": ') == []
    assert parser.feed("{") == [CallBegun("add"), CallArguments("{")]
    assert parser.feed('"a": "</tool') == [CallArguments('"a": "</tool')]
    assert parser.feed('"}}\n</tool_call>') == [CallArguments('"}')]
    parser = JsonCallParser(LIST_OF_CALLS)
    assert parser.feed('[{"name": "add", "parameters": {"a":') == [CallBegun("add"), CallArguments('{"a":')]
    assert parser.feed(' 1}},{"name":"sub","parameters":{}') == [
        CallArguments(" 1}"),
        CallBegun("sub"),
        CallArguments("{}"),
    ]
    assert [*parser.feed("}]"), *parser.finish()] == []
    parser = JsonCallParser(SYNTAXES[HERMES])
    assert parser.feed('<tool_call>{"name": "add", "arguments": {"a": x') == [
        CallBegun("add"),
        CallArguments('{"a": '),
        CallArguments("x"),
    ]
    assert parser.feed("y </tool") == [CallArguments("y ")]
    assert parser.feed("_call> z") == [" z"]


@pytest.mark.parametrize("num_chars", [MAX_BEGINNING - 100, 2 * MAX_BEGINNING])
def test_a_call_whose_name_follows_much_text_is_recognized_at_its_end(num_chars: int) -> None:
    text = f'<tool_call>{{"note": "{"x" * num_chars}", "name": "add", "arguments": {ADD.arguments}}}</tool_call>'
    assert parse(HERMES, text) == parse(HERMES, *text) == ("", [ADD])
    fed = JsonCallParser(SYNTAXES[HERMES]).feed(text[: text.index("}")])
    assert (CallBegun("add") in fed) == (num_chars < MAX_BEGINNING)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('[{"name": "add", "parameters": {"a": 1}}]', "", [ADD]),
        (
            f' [{{"name":"add","parameters":{{"a": 1}}}},\n{{"name":"sub","parameters":{SUB.arguments}}} ] ',
            "",
            [ADD, SUB],
        ),
        ('[{"name": "add", "parameters": {"a"', "", [Call("add", '{"a"')]),
        ('[{"name": "ad', '[{"name": "ad', []),
        ("[", "[", []),
        ("", "", []),
        ("no list {}", "no list {}", []),
        ("x" * MAX_AROUND, "x" * MAX_AROUND, []),
        ('[{"name": "add", "parameters": {"a": 1}}] or {}', " or {}", [ADD]),
        ('[{"name": "add", "parameters": {"a": 1}}, or {}', ", or {}", [ADD]),
    ],
)
def test_a_list_of_calls_is_parsed(text: str, content: str, calls: list[Call]) -> None:
    assert parse_by(LIST_OF_CALLS, text) == (content, calls)
    assert parse_by(LIST_OF_CALLS, *text) == (content, calls)


@pytest.mark.parametrize("call_format", FORMATS)
def test_a_long_run_of_openings_is_content(call_format: ToolCallFormat) -> None:
    """This took 14 s when each opening copied all the text after it."""
    text = SYNTAXES[call_format].opening * 50_000 + "{"
    parser = JsonCallParser(SYNTAXES[call_format])
    content = [*parser.feed(text), *parser.finish()]
    assert "".join(part for part in content if isinstance(part, str)) == text


def test_a_closing_tag_in_a_string_closes_nothing() -> None:
    call = Call("say", '{"text": "</tool_call>"}')
    assert parse(HERMES, written(HERMES, call)) == ("", [call])


def test_content_is_released_as_soon_as_it_cannot_be_a_call() -> None:
    parser = JsonCallParser(SYNTAXES[HERMES])
    assert parser.feed("a <tool_") == ["a "]
    assert parser.feed("box> ") == ["<tool_box> "]
    assert parser.feed(written(HERMES, ADD)) == [CallBegun("add"), CallArguments(ADD.arguments)]
    assert parser.feed("\n") == []
    assert parser.feed("b") == ["\nb"]


def test_content_and_calls_keep_their_order() -> None:
    text = f"a {written(HERMES, ADD)}\n{written(HERMES, SUB)} b"
    add, sub = ([CallBegun(call.name), CallArguments(call.arguments)] for call in (ADD, SUB))
    assert JsonCallParser(SYNTAXES[HERMES]).feed(text) == ["a ", *add, *sub, " b"]


FRAGMENTS = st.sampled_from(
    [
        *(written(call_format, call) for call_format in FORMATS for call in (ADD, SUB)),
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]", "[CALL_ID]"),
        *('{"name": "add", "arguments": {}}', '{"name":', '"', "\\", "{", "}", "[", "]", ";", " ", "\n", "add", "<"),
        *(" " * MAX_AROUND, "x" * (MAX_AROUND - 1)),
    ]
)
TEXTS = st.lists(st.one_of(FRAGMENTS, st.text(max_size=4)), max_size=12).map("".join)


@given(call_format=st.sampled_from(FORMATS), text=TEXTS, data=st.data())
def test_the_result_does_not_depend_on_how_the_text_is_split(
    call_format: ToolCallFormat, text: str, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse(call_format, text)
    assert parse(call_format, *pieces) == whole
    assert parse(call_format, *text) == whole


@given(call_format=st.sampled_from(FORMATS), text=TEXTS)
def test_content_and_arguments_are_subsequences_of_the_text(call_format: ToolCallFormat, text: str) -> None:
    content, calls = parse(call_format, text)
    if not calls:
        assert content == text
    remaining = iter(text)
    assert all(char in remaining for char in content)
    remaining = iter(text)
    assert all(char in remaining for call in calls for char in call.arguments)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.builds(
    Call,
    st.text(string.ascii_letters + string.digits + "_-", min_size=1, max_size=64),
    st.builds(
        json.dumps,
        st.dictionaries(st.text(), JSON, max_size=3),
        indent=st.none() | st.just(1),
        ensure_ascii=st.booleans(),
    ),
)


@given(call_format=st.sampled_from(FORMATS), calls=st.lists(CALLS, min_size=1, max_size=3))
def test_any_calls_are_found_as_they_were_written(call_format: ToolCallFormat, calls: list[Call]) -> None:
    text = "\n".join(written(call_format, call) for call in calls)
    assert parse(call_format, f"Calling: {text}") == ("Calling: ", calls)
    assert parse(call_format, *text) == ("", calls)
