import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraserve.api.http.nesting import nesting_depth


def depth_of(value: object) -> int:
    match value:
        case dict():
            return 1 + max((depth_of(item) for item in value.values()), default=0)
        case list():
            return 1 + max((depth_of(item) for item in value), default=0)
        case _:
            return 0


TEXTS = st.text(alphabet='[]{}"\\/n é', max_size=12)
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=30
)


@given(VALUES, st.sampled_from([None, 1]), st.booleans())
def test_depth_is_right_whatever_strings_contain(value: object, indent: int | None, ascii_only: bool) -> None:
    assert nesting_depth(json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode(), -1) == depth_of(value)


@pytest.mark.parametrize("depth", [31, 32, 33, 5000])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_depth_is_exact_above_the_limit(depth: int, opening: str) -> None:
    closing = "]" if opening == "[" else "}"
    found = nesting_depth((opening * depth + "1" + closing * depth).encode(), 32)
    assert (found > 32) == (depth > 32)
    assert found in (0, depth)


@pytest.mark.parametrize("body", [b"", b'"', b'"[[', b"]]]", b"\xff[", b'\\"[', b"[" * 100 + b'"'])
def test_bytes_that_are_not_json_have_a_bounded_depth(body: bytes) -> None:
    assert nesting_depth(body, 0) <= 100
