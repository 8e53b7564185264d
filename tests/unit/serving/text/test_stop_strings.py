from hypothesis import given
from hypothesis import strategies as st

from loraserve.serving.text.stop_strings import StopMatcher

texts = st.text(alphabet="abS T", max_size=40)
stop_lists = st.lists(st.text(alphabet="abS T", min_size=1, max_size=5), min_size=1, max_size=4, unique=True)


def run(pieces: list[str], stops: list[str], include_stop: bool = False) -> tuple[str, str | None, list[str]]:
    matcher = StopMatcher(tuple(stops), include_stop)
    shown: list[str] = []
    for piece in pieces:
        shown.append(matcher.feed(piece))
        if matcher.matched is not None:
            return "".join(shown), matcher.matched, shown
    shown.append(matcher.release())
    return "".join(shown), None, shown


def first_complete(text: str, stops: list[str]) -> tuple[int, str] | None:
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return end - len(stop), stop
    return None


def cut(text: str, positions: list[int]) -> list[str]:
    ends = [*sorted(min(position, len(text)) for position in positions), len(text)]
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@given(texts, stop_lists, st.lists(st.integers(0, 40), max_size=10), st.booleans())
def test_matching_equals_a_search_character_by_character(
    text: str, stops: list[str], positions: list[int], include_stop: bool
) -> None:
    # One piece may complete two stops. Tokens are fed one by one, so pieces of one character define the result.
    shown, matched, _ = run(list(text), stops, include_stop)
    expected = first_complete(text, stops)
    if expected is None:
        assert (shown, matched) == (text, None)
    else:
        start, stop = expected
        assert matched == stop
        assert shown == text[: start + len(stop) * include_stop]
    assert run(cut(text, positions), stops, include_stop)[:2] == (shown, matched)


@given(texts, stop_lists)
def test_shows_nothing_that_could_begin_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(tuple(stops), include_stop=False)
    shown = ""
    for position, char in enumerate(text):
        shown += matcher.feed(char)
        if matcher.matched is not None:
            return
        held = text[len(shown) : position + 1]
        assert text[: position + 1] == shown + held
        assert all(not stop.startswith(text[start : position + 1]) for start in range(len(shown)) for stop in stops)


def test_a_partial_match_that_fails_is_released() -> None:
    matcher = StopMatcher(("</end>",), include_stop=False)
    assert [matcher.feed("a</e"), matcher.feed("x"), matcher.feed("</end"), matcher.release()] == [
        "a",
        "</ex",
        "",
        "</end",
    ]


def test_include_stop_keeps_the_stop_string_in_the_text() -> None:
    assert run(["one ST", "OP two"], ["STOP"], include_stop=True)[:2] == ("one STOP", "STOP")
    assert run(["one ST", "OP two"], ["STOP"])[:2] == ("one ", "STOP")
