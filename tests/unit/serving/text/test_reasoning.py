import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraserve.engine.request import ReasoningTokens
from loraserve.serving.text.reasoning import MARKS, ReasoningFormat, ReasoningSplitter, ReasoningStart

QWEN3, MISTRAL = MARKS[ReasoningFormat.QWEN3], MARKS[ReasoningFormat.MISTRAL]


def split(start: ReasoningStart, *pieces: str) -> tuple[str, str]:
    splitter = ReasoningSplitter(start)
    parts = [*map(splitter.feed, pieces), splitter.finish()]
    return "".join(reasoning for reasoning, _ in parts), "".join(content for _, content in parts)


@pytest.mark.parametrize(
    ("has_begun", "text", "reasoning", "content"),
    [
        (False, "<think>\nHm.\n\nSo.\n</think>\n\n4", "Hm.\n\nSo.", "4"),
        (False, " \n<think>Hm.</think>4 ", "Hm.", "4 "),
        (True, "\nHm. <b> </th>\n</think>\n\n4\n\n5", "Hm. <b> </th>", "4\n\n5"),
        (True, "<think>\nHm.</think>4", "Hm.", "4"),
        (True, "Hm. </thi", "Hm. </thi", ""),
        (True, "Hm.\n", "Hm.", ""),
        (True, "</think>4", "", "4"),
        (True, "", "", ""),
        (True, "Hm.</think>\n\n", "Hm.", ""),
        (True, "Hm.</think>a <think>b</think> c</think>", "Hm.", "a <think>b</think> c</think>"),
        (False, "<think></think>", "", ""),
        (False, "4", "", "4"),
        (False, "", "", ""),
        (False, "\n 4 <think>Hm.</think>", "", "\n 4 <think>Hm.</think>"),
        (False, " <thi", "", " <thi"),
        (False, "<thinking>", "", "<thinking>"),
        (False, "Hm.</think>4", "", "Hm.</think>4"),
        (True, " \n", "", ""),
        (True, " <thi", "<thi", ""),
        (True, "\n</thi", "</thi", ""),
    ],
)
def test_reasoning_and_content_are_separated(has_begun: bool, text: str, reasoning: str, content: str) -> None:
    start = ReasoningStart(QWEN3, has_begun)
    assert split(start, text) == split(start, *text) == (reasoning, content)


def test_mistral_marks_are_recognized() -> None:
    assert split(ReasoningStart(MISTRAL, has_begun=False), "[THINK]Hm. </think>[/THINK]4") == ("Hm. </think>", "4")


def test_text_is_released_as_soon_as_it_is_certain() -> None:
    splitter = ReasoningSplitter(ReasoningStart(QWEN3, has_begun=False))
    fed = ["<th", "ink>\n", "Hm", " \n", "so</", "b>", "\n</think", ">\n", "\n", "4", "\n", "5"]
    assert [splitter.feed(text) for text in fed] == [
        *(("", ""), ("", ""), ("Hm", ""), ("", ""), (" \nso", ""), ("</b>", ""), ("", ""), ("", "")),
        *(("", ""), ("", "4"), ("", "\n"), ("", "5")),
    ]


@pytest.mark.parametrize(
    ("has_begun", "tokens", "num_tokens"),
    [
        (False, ["<think>", "a", "b", "</think>", "\n\n", "c"], 4),
        (True, ["a", "b", "</th", "ink>", "c", "d"], 4),
        (True, ["a", "b"], 2),
        (False, ["a", "</think>", "b"], 0),
        (False, ["\n", "a"], 0),
        (True, ["</think>", "a"], 1),
    ],
)
def test_reasoning_tokens_are_counted(has_begun: bool, tokens: list[str], num_tokens: int) -> None:
    splitter = ReasoningSplitter(ReasoningStart(QWEN3, has_begun))
    late = ReasoningSplitter(ReasoningStart(QWEN3, has_begun))
    for index, token in enumerate(tokens):
        for each in (splitter, late):
            each.take_token(0, len("".join(tokens[:index])))
        splitter.feed(token)
    late.feed("".join(tokens))
    for each in (splitter, late):
        each.finish()
        assert each.num_tokens == num_tokens


def split_by_tokens(reasoning: ReasoningTokens, *tokens: tuple[int, str]) -> tuple[str, str, int]:
    splitter = ReasoningSplitter(ReasoningStart(QWEN3, reasoning.opening_id is None, reasoning))
    parts, num_chars = list[tuple[str, str]](), 0
    for token_id, text in tokens:
        splitter.take_token(token_id, num_chars)
        num_chars += len(text)
        parts.append(splitter.feed(text))
    parts.append(splitter.finish())
    return "".join(each for each, _ in parts), "".join(each for _, each in parts), splitter.num_tokens


BEGUN, MAY_OPEN, LATE = ReasoningTokens(None, 2), ReasoningTokens(1, 2), ReasoningTokens(1, 2, opens_within=2)
OPENING, CLOSING, SPELT = (1, "<think>"), (2, "</think>"), [(0, "</"), (0, "think"), (0, ">")]


@pytest.mark.parametrize(
    ("reasoning", "tokens", "outcome"),
    [
        (BEGUN, [(0, "a"), *SPELT, (0, " b\n"), CLOSING, (0, "4")], ("a</think> b", "4", 6)),
        (BEGUN, [OPENING, (0, "a"), (0, "</thi"), CLOSING, (0, "</think>")], ("a</thi", "</think>", 4)),
        (BEGUN, [(0, "a"), *SPELT], ("a</think>", "", 4)),
        (MAY_OPEN, [OPENING, (0, "a"), CLOSING, (0, "4")], ("a", "4", 3)),
        (MAY_OPEN, [(0, "<think>"), (0, "a"), CLOSING, (0, "4")], ("", "<think>a</think>4", 0)),
        (MAY_OPEN, [(0, "\n"), OPENING, (0, "a")], ("", "\n<think>a", 0)),
        (LATE, [(0, "\n"), OPENING, (0, "a"), *SPELT, CLOSING, (0, "4")], ("a</think>", "4", 7)),
        (LATE, [OPENING, (0, "a"), CLOSING, (0, "4")], ("a", "4", 3)),
        (LATE, [(0, "\n"), (0, "\n"), OPENING, (0, "a")], ("", "\n\n<think>a", 0)),
        (LATE, [(0, "<th"), (0, "ink>"), (0, "a"), CLOSING], ("", "<think>a</think>", 0)),
        (LATE, [(0, "4")], ("", "4", 0)),
    ],
)
def test_text_that_spells_a_mark_is_not_one_if_the_engine_goes_by_tokens(
    reasoning: ReasoningTokens, tokens: list[tuple[int, str]], outcome: tuple[str, str, int]
) -> None:
    assert split_by_tokens(reasoning, *tokens) == outcome


def test_long_whitespace_is_not_scanned_repeatedly() -> None:
    """A hundred thousand tokens of whitespace used to take 20 s."""
    text = "<think>a" + " " * 1_000_000 + "b" + " " * 1_000_000 + "</think>c"
    pieces = [text[start : start + 10] for start in range(0, len(text), 10)]
    assert split(ReasoningStart(QWEN3, has_begun=False), *pieces) == ("a" + " " * 1_000_000 + "b", "c")


TEXTS = st.lists(
    st.sampled_from(["<think>", "</think>", "<think", "</", "think>", " ", "\n", "a", "Hm.", "<", ">"]), max_size=10
).map("".join)


@given(has_begun=st.booleans(), text=TEXTS, data=st.data())
def test_the_result_does_not_depend_on_how_the_text_is_split(has_begun: bool, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    start = ReasoningStart(QWEN3, has_begun)
    whole = split(start, text)
    assert split(start, *pieces) == whole
    assert split(start, *text) == whole


@given(has_begun=st.booleans(), text=TEXTS)
def test_nothing_is_lost_except_marks_and_whitespace_around_reasoning(has_begun: bool, text: str) -> None:
    expected = "", text
    if has_begun or text.lstrip().startswith("<think>"):
        reasoning, _, content = text.lstrip().removeprefix("<think>").partition("</think>")
        expected = reasoning.strip(), content.lstrip()
    assert split(ReasoningStart(QWEN3, has_begun), text) == expected
