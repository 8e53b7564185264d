import time
from itertools import count

import numpy as np
import pytest

from loraserve.engine.grammars.matcher import GrammarMatcher
from loraserve.engine.request import Grammar, GrammarKind, ReasoningTokens
from tests.support.hash_grammars import CHARS, EOS, VOCAB_SIZE, hash_grammars

OPENING, CLOSING = CHARS.index("0"), CHARS.index("1")
BEGUN, MAY_OPEN = ReasoningTokens(None, CLOSING), ReasoningTokens(OPENING, CLOSING)
EVERYTHING = {*range(VOCAB_SIZE)}


def ids(text: str) -> list[int]:
    return [CHARS.index(char) for char in text]


def matcher_of(reasoning: ReasoningTokens, text: str = "") -> GrammarMatcher:
    grammar = Grammar(GrammarKind.CHOICE, '["ab", "ac"]', reasoning)
    matcher = hash_grammars().compile(grammar).result().copy()
    for token_id in ids(text):
        assert token_id in allowed(matcher)
        assert matcher.take(token_id)
    assert not matcher.error
    return matcher


def allowed(matcher: GrammarMatcher) -> set[int]:
    return allowed_by(matcher.mask())


def allowed_by(mask: np.ndarray) -> set[int]:
    return {*np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()}


@pytest.mark.parametrize("text", ["", "x", "ab", "x0y"])
def test_reasoning_may_contain_any_token_except_eos(text: str) -> None:
    matcher = matcher_of(BEGUN, text)
    assert allowed(matcher) == EVERYTHING - {EOS}
    assert matcher.forced_tokens() == []
    assert not matcher.is_complete


@pytest.mark.parametrize(
    ("reasoning", "text"), [(BEGUN, "1"), (BEGUN, "xyz1"), (MAY_OPEN, "01"), (MAY_OPEN, "0ab01"), (BEGUN, "ab1")]
)
def test_the_grammar_constrains_the_output_after_reasoning(reasoning: ReasoningTokens, text: str) -> None:
    matcher = matcher_of(reasoning, text)
    assert allowed(matcher) == {*ids("a")}
    assert matcher.forced_tokens() == ids("a")
    for token_id in ids("ab"):
        assert matcher.take(token_id)
    assert matcher.is_complete
    assert not matcher_of(reasoning, text).take(CHARS.index("x"))


def test_the_first_token_decides_whether_there_is_reasoning() -> None:
    matcher = matcher_of(MAY_OPEN)
    assert allowed(matcher) == {OPENING, *ids("a")}
    assert matcher.forced_tokens() == []
    assert allowed(matcher_of(MAY_OPEN, "0")) == EVERYTHING - {EOS}
    assert allowed(matcher_of(MAY_OPEN, "a")) == {*ids("bc")}
    assert not matcher_of(MAY_OPEN).take(CHARS.index("x"))


def test_a_copy_starts_from_the_beginning() -> None:
    thought = matcher_of(BEGUN, "x1")
    assert allowed(thought.copy()) == EVERYTHING - {EOS}
    assert allowed(thought) == {*ids("a")}


@pytest.mark.parametrize(
    ("reasoning", "text", "draft", "num_masks"),
    [
        (BEGUN, "", "xy", 2),
        (BEGUN, "", "xy1a", 4),
        (BEGUN, "", "x1ab", 4),
        (BEGUN, "", "x1xa", 2),
        (BEGUN, "x1", "ab", 2),
        (MAY_OPEN, "", "0x1a", 4),
        (MAY_OPEN, "", "ab", 2),
        (MAY_OPEN, "", "xy", 0),
        (MAY_OPEN, "0", "y", 1),
    ],
)
def test_masks_after_a_draft_equal_those_after_taking_its_tokens(
    reasoning: ReasoningTokens, text: str, draft: str, num_masks: int
) -> None:
    matcher, beside = matcher_of(reasoning, text), matcher_of(reasoning, text)
    before = allowed(matcher)
    masks = matcher.masks_after(ids(draft))
    assert len(masks) == num_masks
    for token_id, mask in zip(ids(draft), masks, strict=False):
        assert beside.take(token_id)
        assert allowed_by(mask) == allowed(beside)
    assert allowed(matcher) == before, "it has not moved"


def test_a_draft_ends_before_an_eos_in_the_reasoning() -> None:
    assert len(matcher_of(BEGUN).masks_after([*ids("x"), EOS, *ids("y")])) == 1


def test_drafts_past_the_reasoning_stop_after_half_of_the_answers_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a prediction contains the closing token, each step of the reasoning may draft it."""
    clock_s = count(0.0, 0.01)
    matcher = matcher_of(BEGUN, "xyz")
    monkeypatch.setattr(time, "thread_time", lambda: next(clock_s))
    lengths = [len(matcher.masks_after(ids("x1ab"))) for _ in range(20)]
    assert (lengths[0], lengths[-1]) == (4, 1)
    assert matcher.take(CLOSING)
    assert allowed(matcher) == {*ids("a")}
    assert not matcher.error
