import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraserve.serving.text.found import CallArguments, CallBegun, CallPart
from loraserve.serving.text.harmony import MARKS, HarmonyReader, HarmonyStart

IDS = {mark: 900 + i for i, mark in enumerate(MARKS)}
THOUGHT = "<|channel|>analysis<|message|>Two and two.<|end|>"
NEXT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>4"
CALL = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
ADD = [CallBegun("add"), CallArguments('{"a": 1}')]
Token = tuple[int, str]
Read = tuple[str, str, list[CallPart]]


def tokens_of(text: str, size: int = 3) -> list[Token]:
    """One token for each mark; other text in tokens of `size` characters."""
    found: list[Token] = []
    for part in re.split("(" + "|".join(map(re.escape, MARKS)) + ")", text):
        found += [(IDS[part], part)] if part in IDS else [(7, part[i : i + size]) for i in range(0, len(part), size)]
    return found


def started(*, tools: frozenset[str] | None = frozenset(("add",)), is_in_message: bool = False) -> HarmonyReader:
    return HarmonyStart({token_id: mark for mark, token_id in IDS.items()}, tools, is_in_message).reader()


def read(tokens: list[Token], reader: HarmonyReader, fed_late: int = 0) -> Read:
    """fed_late: how many tokens may be taken before their text is fed; a token that ends an answer has no text."""
    start, waiting, reasoning, content = 0, "", "", ""
    calls: list[CallPart] = []

    def note(read: tuple[str, str]) -> None:
        nonlocal reasoning, content
        reasoning, content = reasoning + read[0], content + read[1]
        for part in reader.taken_calls():
            if isinstance(part, CallArguments) and calls and isinstance(calls[-1], CallArguments):
                calls[-1] = CallArguments(calls[-1].text + part.text)
            else:
                calls.append(part)

    for number, (token_id, text) in enumerate(tokens):
        reader.take_token(token_id, start)
        start += len(text)
        waiting += text
        if fed_late == 0 or number % (fed_late + 1) == fed_late:
            note(reader.feed(waiting))
            waiting = ""
    note(reader.feed(waiting))
    note(reader.finish())
    return reasoning, content, calls


def both(text: str, **options: object) -> Read:
    """The result, which must be the same for every split of the text."""
    found = read(tokens_of(text), started(**options))
    for size, fed_late in ((1, 0), (1000, 0), (1, 5), (2, 1000)):
        assert read(tokens_of(text, size), started(**options), fed_late) == found
    return found


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (f"{THOUGHT}{NEXT}{FINAL}", "Two and two.", "4"),
        (f"{THOUGHT}{NEXT}{FINAL}<|return|>", "Two and two.", "4"),
        (FINAL, "", "4"),
        (f"{NEXT}{FINAL}", "", "4"),
        (f"{THOUGHT}{NEXT}<|channel|>analysis<|message|>Four.<|end|>{NEXT}{FINAL}", "Two and two.\nFour.", "4"),
        (f"<|channel|>commentary<|message|>I add.<|end|>{NEXT}{FINAL}", "", "I add.\n4"),
        (f"<|channel|>commentary<|message|>I add.<|end|>{NEXT}{THOUGHT}{NEXT}{FINAL}", "Two and two.", "I add.\n4"),
        (f"{THOUGHT}{NEXT}<|channel|>fin", "Two and two.", ""),
        ("<|channel|>analysis<|message|>Two <b> <|", "Two <b> <|", ""),
        ("<|channel|>analysis<|message|>", "", ""),
        (f"<|channel|>analysis<|message|>Two.{FINAL}", "Two.", "4"),
        (f"<|channel|>analysis<|message|>Two.{NEXT}{FINAL}", "Two.", "4"),
        (f"<|channel|>analysis{FINAL}", "", "4"),
        (f"{FINAL}<|end|>5", "", "4\n5"),
        ("<|channel|>analysis<|end|>5", "", "5"),
        ("<|channel|>analysis<|end|>", "", ""),
        ("4 5", "", "4 5"),
        (" \n4", "", " \n4"),
        (" " * 300 + "4", "", " " * 300 + "4"),
        ("<|message|>4", "", "4"),
        ("<|channel|>" + "x" * 300 + "<|message|>4", "", "<|channel|>" + "x" * 300 + "4"),
        ("to=5 works", "", "to=5 works"),
        ("to", "", "to"),
        ("", "", ""),
        (f"{CALL[:11]}analysis to=python code<|message|>1 + 1<|call|>{NEXT}{FINAL}", "1 + 1", "4"),
        (
            f"<|channel|>commentary to=python<|message|>1<|call|><|start|>python to=assistant<|channel|>commentary"
            f"<|message|>2<|end|>{NEXT}{FINAL}",
            "",
            "1\n4",
        ),
    ],
)
def test_reasoning_and_content_are_separated(text: str, reasoning: str, content: str) -> None:
    assert both(text) == (reasoning, content, [])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f'{THOUGHT}{NEXT}{CALL}{{"a": 1}}<|call|>', "", ADD),
        (f'{CALL}{{"a": 1}}', "", ADD),
        (f'{CALL}{{"a": ', "", [CallBegun("add"), CallArguments('{"a": ')]),
        (f'{THOUGHT}{NEXT} to=functions.add<|channel|>commentary json<|message|>{{"a": 1}}', "", ADD),
        (' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>', "", ADD),
        ('<|channel|>analysis to=functions.add code<|message|>{"a": 1}<|call|>', "", ADD),
        ('<|channel|>commentary to=add<|message|>{"a": 1}<|call|>', "", ADD),
        ("<|channel|>commentary to=functions.sub<|message|>{}", "", [CallBegun("sub"), CallArguments("{}")]),
        (f"{CALL}<|call|>", "", [CallBegun("add"), CallArguments("{}")]),
        (f"{CALL}1 + 1<|call|>", "", [CallBegun("add"), CallArguments("1 + 1")]),
        (
            f'<|channel|>commentary<|message|>I add.<|end|>{NEXT}{CALL}{{"a": 1}}<|call|>{NEXT}{CALL}<|call|>',
            "I add.",
            [*ADD, CallBegun("add"), CallArguments("{}")],
        ),
        ('<|channel|>commentary to=functions.a/b<|message|>{"a": 1}', '{"a": 1}', []),
    ],
)
def test_calls_are_found_with_their_arguments(text: str, content: str, calls: list[CallPart]) -> None:
    assert both(text)[1:] == (content, calls)


def test_calls_are_content_if_there_are_no_tools() -> None:
    assert both(f'{CALL}{{"a": 1}}<|call|>', tools=None) == ("", '{"a": 1}', [])


@pytest.mark.parametrize("mark", MARKS)
def test_a_mark_spelled_in_other_tokens_is_text(mark: str) -> None:
    for head, place in ((FINAL, 1), ("<|channel|>analysis<|message|>", 0)):
        tokens = [*tokens_of(head), *((7, char) for char in f"a {mark} b")]
        assert read(tokens, started())[place].endswith(f"a {mark} b")
    tokens = [*tokens_of(CALL), *((7, char) for char in f'{{"a": "{mark}"}}'), (IDS["<|call|>"], "<|call|>")]
    assert read(tokens, started())[2] == [CallBegun("add"), CallArguments(f'{{"a": "{mark}"}}')]


def test_an_end_token_without_text_ends_its_message() -> None:
    assert read([*tokens_of(CALL), (IDS["<|call|>"], "")], started())[2] == [CallBegun("add"), CallArguments("{}")]
    assert read(tokens_of(CALL), started())[2] == [CallBegun("add")], "cut off before its arguments"


def test_a_message_begun_in_the_prompt_is_continued() -> None:
    assert both("4<|end|>", is_in_message=True) == ("", "4", [])


def test_text_is_released_as_soon_as_it_is_certain() -> None:
    reader, start, found = started(), 0, []
    for token_id, text in [*tokens_of("<|channel|>analysis<|message|>"), (7, "Hm"), (7, " <"), (7, "b"), (7, "<|end|")]:
        reader.take_token(token_id, start)
        start += len(text)
        found.append(reader.feed(text)[0])
    assert found[-4:] == ["Hm", " <", "b", "<|end|"]


PARTS = st.sampled_from(
    [THOUGHT, NEXT, FINAL, CALL, '{"a": 1}', "<|call|>", "<|end|>", "<|", "to=", " ", "x\n", "x" * 300]
)


@given(st.lists(PARTS).map("".join))
def test_the_result_does_not_depend_on_how_the_text_is_split(text: str) -> None:
    both(text)


@pytest.mark.parametrize("fed_late", [0, 3, 1000])
def test_tokens_of_reasoning_and_of_its_marks_are_counted(fed_late: int) -> None:
    reader, thought = started(), tokens_of(THOUGHT)
    read(tokens_of(f"{THOUGHT}{NEXT}{THOUGHT}{NEXT}{FINAL}"), reader, fed_late)
    assert reader.num_tokens == 2 * len(thought) + len(tokens_of(NEXT))
    assert started().num_tokens == 0


def test_tokens_of_truncated_reasoning_are_counted() -> None:
    reader, tokens = started(), tokens_of("<|channel|>analysis<|message|>Two and tw")
    read(tokens, reader)
    assert reader.num_tokens == len(tokens)
