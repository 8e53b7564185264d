import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraserve.serving.text.harmony import HarmonyStart
from loraserve.serving.tool_calls.formats import SYNTAXES, ToolCallFormat
from loraserve.serving.tool_calls.found import CallArguments, CallBegun, content_joined
from loraserve.serving.tool_calls.parser import ToolCallParser

THOUGHT = "<|channel|>analysis<|message|>Two and two.<|end|>"
NEXT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>4"
CALL = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
READ_CALL = "<|channel|>commentary to=functions.add<|message|>"


def split(*pieces: str, is_in_message: bool = False) -> tuple[str, str]:
    reader = HarmonyStart(is_in_message).reader()
    parts = [*map(reader.feed, pieces), reader.finish()]
    return "".join(reasoning for reasoning, _ in parts), "".join(content for _, content in parts)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (f"{THOUGHT}{NEXT}{FINAL}", "Two and two.", "4"),
        (f"{THOUGHT}{NEXT}{FINAL}<|return|>", "Two and two.", "4"),
        (FINAL, "", "4"),
        (f"{THOUGHT}{NEXT}<|channel|>analysis<|message|>Four.<|end|>{NEXT}{FINAL}", "Two and two.\nFour.", "4"),
        (f"<|channel|>commentary<|message|>I add.<|end|>{NEXT}{FINAL}", "", "I add.\n4"),
        (f"<|channel|>commentary<|message|>I add.<|end|>{NEXT}{THOUGHT}{NEXT}{FINAL}", "Two and two.", "I add.\n4"),
        (f'{THOUGHT}{NEXT}{CALL}{{"a": 1}}<|call|>', "Two and two.", f'{READ_CALL}{{"a": 1}}<|call|>'),
        (
            f'{THOUGHT}{NEXT} to=functions.add<|channel|>commentary json<|message|>{{"a": 1}}',
            "Two and two.",
            f'{READ_CALL}{{"a": 1}}',
        ),
        (
            ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>',
            "",
            f'{READ_CALL}{{"a": 1}}<|call|>',
        ),
        (
            "<|channel|>analysis to=python code<|message|>1<|call|>",
            "",
            "<|channel|>commentary to=python<|message|>1<|call|>",
        ),
        (f"{THOUGHT}{NEXT}<|channel|>fin", "Two and two.", ""),
        ("<|channel|>analysis<|message|>Two <b> <|", "Two <b> <|", ""),
        ("<|channel|>analysis<|message|>", "", ""),
        (f"{THOUGHT}{FINAL}", "Two and two.", "4"),
        (f"<|channel|>analysis<|message|>Two.{NEXT}{FINAL}", "Two.", "4"),
        ("4 <|channel|> 5", "", "4 <|channel|> 5"),
        (" \n4", "", " \n4"),
        ("<|chan", "", "<|chan"),
        ("<|channel|>" + "x" * 300, "", "<|channel|>" + "x" * 300),
        ("to", "", "to"),
        ("", "", ""),
    ],
)
def test_what_was_thought_said_and_called(text: str, reasoning: str, content: str) -> None:
    assert split(text) == split(*text) == (reasoning, content)


def test_a_message_that_the_prompt_began_goes_on() -> None:
    assert split("4<|end|>", is_in_message=True) == ("", "4")
    assert split("<|channel|>", is_in_message=True) == ("", "<|channel|>")


def test_all_is_let_out_as_soon_as_it_is_certain() -> None:
    reader = HarmonyStart(is_in_message=False).reader()
    fed = ["<|channel|>", "analysis", "<|message|>", "Hm", " <", "b", "<|end", "|>", NEXT, FINAL, "2"]
    assert [reader.feed(text) for text in fed] == [
        *(("", ""), ("", ""), ("", ""), ("Hm", ""), (" ", ""), ("<b", ""), ("", ""), ("", "")),
        *(("", ""), ("", "4"), ("", "2")),
    ]


PARTS = st.sampled_from([THOUGHT, NEXT, FINAL, CALL, '{"a": 1}', "<|call|>", "<|end|>", "<|", "to=", " ", "x\n", "<"])


@given(st.lists(PARTS).map("".join), st.data())
def test_the_outcome_does_not_depend_on_how_the_text_was_cut(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert split(*pieces) == split(text) == split(*text)


@pytest.mark.parametrize("step", [1, 4, 1000])
def test_tokens_of_reasoning_and_its_marks_are_counted(step: int) -> None:
    """However late their text is fed."""
    reader = HarmonyStart(is_in_message=False).reader()
    text = f"{THOUGHT}{NEXT}{FINAL}"
    for start in range(0, len(text), 5):
        reader.take_token(7, start)
    for start in range(0, len(text), step):
        reader.feed(text[start : start + step])
    assert reader.num_tokens == len(range(0, len(THOUGHT), 5))
    assert HarmonyStart(is_in_message=False).reader().num_tokens == 0


def test_tokens_of_reasoning_that_is_cut_off_are_counted() -> None:
    reader = HarmonyStart(is_in_message=False).reader()
    for start in range(0, 40, 10):
        reader.take_token(7, start)
    reader.feed("<|channel|>analysis<|message|>Two and tw")
    assert reader.num_tokens == 4


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f'{THOUGHT}{NEXT}{CALL}{{"a": 1}}<|call|>', [CallBegun("add"), CallArguments('{"a": 1}')]),
        (f'{CALL}{{"a": 1}}', [CallBegun("add"), CallArguments('{"a": 1}')]),
        (f'{CALL}{{"a": ', [CallBegun("add"), CallArguments('{"a": ')]),
        (
            f'<|channel|>commentary<|message|>I add.<|end|>{NEXT}{CALL}{{"a": 1}}<|call|>{NEXT}{CALL}{{}}<|call|>',
            ["I add.", CallBegun("add"), CallArguments('{"a": 1}'), CallBegun("add"), CallArguments("{}")],
        ),
        (f"{CALL}1 + 1<|call|>", [f"{READ_CALL}1 + 1<|call|>"]),
    ],
)
def test_its_calls_are_found(text: str, found: list[object]) -> None:
    for pieces in ([text], [*text]):
        reader, parser = HarmonyStart(is_in_message=False).reader(), ToolCallParser(SYNTAXES[ToolCallFormat.OPENAI])
        parts = [part for piece in pieces for part in parser.feed(reader.feed(piece)[1])]
        parts += [*parser.feed(reader.finish()[1]), *parser.finish()]
        joined: list[object] = []
        for part in content_joined(parts):
            if isinstance(part, CallArguments) and joined and isinstance(joined[-1], CallArguments):
                joined[-1] = CallArguments(joined[-1].text + part.text)
            else:
                joined.append(part)
        assert joined == found
