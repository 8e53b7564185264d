import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraserve.serving.tool_calls.json_extent import Extent, JsonExtent

JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(value=st.lists(JSON) | st.dictionaries(st.text(), JSON), rest=st.text(max_size=3))
def test_an_extent_ends_where_the_json_ends(value: object, rest: str) -> None:
    text = json.dumps(value, indent=1, ensure_ascii=False)
    whole, by_char = JsonExtent(), JsonExtent()
    assert whole.feed(text + rest) == len(text)
    assert [by_char.feed(char) for char in text] == [1] * len(text)
    assert whole.state is by_char.state is Extent.CLOSED


@pytest.mark.parametrize(
    ("text", "position"),
    [("{<", 1), ("{'a'", 1), ('{"a\nb"', 3), ("{//", 1), ('{"a": x', 6)],
)
def test_text_that_cannot_be_json_is_broken_at_the_first_wrong_character(text: str, position: int) -> None:
    extent = JsonExtent()
    assert (extent.feed(text), extent.state) == (position, Extent.BROKEN)


def test_nesting_of_any_depth_is_followed() -> None:
    extent = JsonExtent()
    assert (extent.feed("[" * 10_000 + "]" * 10_001), extent.state) == (20_000, Extent.CLOSED)


def test_an_open_extent_takes_all_text() -> None:
    extent = JsonExtent()
    assert [extent.feed(piece) for piece in ('{"a\\', '"', "}", '": [1', "")] == [4, 1, 1, 5, 0]
    assert extent.state is Extent.OPEN
