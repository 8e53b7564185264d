import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraserve.serving.tool_calls.python_literal import MAX_DEPTH, NotALiteral, read_literal

LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(LITERALS)
def test_what_python_and_json_write_is_read(value: Any) -> None:
    assert read_literal(repr(value)) == value
    assert read_literal(json.dumps(value)) == value
    assert read_literal(json.dumps(value, ensure_ascii=False, indent=1)) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"'it\'s'", "it's"),
        ("'''a'b\n''c'''", "a'b\n''c"),
        ('""', ""),
        ('"""a"""', "a"),
        ('"a\nb"', "a\nb"),
        (r'"\x41\u00e9\U0001F642\101\d\/"', "AéAA\\d/".replace("éA", "é🙂")),
        (r'"\ud83d\ude42"', "🙂"),
        ("(1, 2)", [1, 2]),
        ("(1,)", [1]),
        ("(1)", 1),
        ("((1, 2))", [1, 2]),
        ("()", []),
        ("[1, 2, ]", [1, 2]),
        ("{1: 'a', None: 2, True: 3,}", {"1": "a", "null": 2, "true": 3}),
        ("[true, false, null, True]", [True, False, None, True]),
        ("+1_000", 1000),
        ("007", 7),
        ("-.5e1", -5.0),
        ("2.", 2.0),
    ],
)
def test_other_spellings_are_read(text: str, value: Any) -> None:
    assert read_literal(f" {text}\n") == value


@pytest.mark.parametrize(
    "text",
    [
        *("", "a", "f()", "1 + 1", "1 2", "[1", "[1 2]", "{1}", "{[1]: 2}", "'a", '"a\\', "nan", "1e999"),
        *("__import__('os')", "[x for x in y]", "lambda: 1", "-'a'", "b'a'", "f'a'"),
        *("...", "1j", "0x", r"'\U00110000'", "9" * 500),
        "[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2),
        "{" * 100_000,
        "(" * 100_000,
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(NotALiteral):
        read_literal(text)
