import numpy as np
import pytest

from loraserve.engine.grammars.matcher import OutputMatcher
from loraserve.engine.grammars.reasoning_limit import ReasoningLimiter
from loraserve.engine.request import Grammar, GrammarKind, ReasoningLimit, ReasoningTokens
from tests.support.hash_grammars import CHARS, VOCAB_SIZE, hash_grammars

OPENING, CLOSING = CHARS.index("0"), CHARS.index("1")
BEGUN, MAY_OPEN = ReasoningTokens(None, CLOSING), ReasoningTokens(OPENING, CLOSING, opens_within=2)
FIRST = ReasoningTokens(OPENING, CLOSING)


def ids(text: str) -> list[int]:
    return [CHARS.index(char) for char in text]


def limiter(
    tokens: ReasoningTokens, max_tokens: int, text: str = "", grammar: OutputMatcher | None = None
) -> ReasoningLimiter:
    matcher = ReasoningLimiter(ReasoningLimit(tokens, max_tokens), VOCAB_SIZE, grammar)
    for token_id in ids(text):
        assert matcher.take(token_id)
    return matcher


def has_to_close(matcher: ReasoningLimiter) -> bool:
    mask = matcher.mask()
    if mask is not None:
        assert np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist() == [CLOSING]
    assert matcher.forced_tokens() == ([] if mask is None else [CLOSING])
    assert not matcher.is_complete
    assert matcher.error == ""
    return mask is not None


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "text", "closes"),
    [
        (BEGUN, 0, "", True),
        (BEGUN, 2, "a", False),
        (BEGUN, 2, "ab", True),
        (BEGUN, 2, "ab1", False),
        (BEGUN, 2, "a1", False),
        (BEGUN, 2, "a1bcd0ef", False),
        (MAY_OPEN, 0, "", False),
        (MAY_OPEN, 0, "0", True),
        (MAY_OPEN, 2, "0ab", True),
        (MAY_OPEN, 2, "x0ab", True),
        (MAY_OPEN, 2, "xy0abc", False),
        (FIRST, 2, "0ab", True),
        (FIRST, 2, "x0ab", False),
        (MAY_OPEN, 2, "0ab1", False),
        (MAY_OPEN, 2, "abcdef", False),
    ],
)
def test_reasoning_must_end_once_it_has_as_many_tokens_as_allowed(
    tokens: ReasoningTokens, max_tokens: int, text: str, closes: bool
) -> None:
    matcher = limiter(tokens, max_tokens, text)
    assert has_to_close(matcher) is closes
    assert has_to_close(matcher.copy()) is has_to_close(limiter(tokens, max_tokens)), "a copy has no output"


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "text"),
    [(BEGUN, 3, ""), (BEGUN, 3, "a"), (BEGUN, 3, "a1bc"), (MAY_OPEN, 1, ""), (MAY_OPEN, 2, "0"), (MAY_OPEN, 0, "ab")],
)
def test_the_next_token_is_not_awaited_if_any_may_follow_it(
    tokens: ReasoningTokens, max_tokens: int, text: str
) -> None:
    assert not limiter(tokens, max_tokens, text).is_awaited
    for char in "a01":
        assert not has_to_close(limiter(tokens, max_tokens, text + char))


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "text"), [(BEGUN, 3, "ab"), (BEGUN, 1, ""), (MAY_OPEN, 0, ""), (MAY_OPEN, 2, "0a")]
)
def test_the_token_before_the_limit_is_awaited(tokens: ReasoningTokens, max_tokens: int, text: str) -> None:
    assert limiter(tokens, max_tokens, text).is_awaited
    assert any(has_to_close(limiter(tokens, max_tokens, text + char)) for char in "a0")


@pytest.mark.parametrize("text", ["", "a", "0", "0a", "ab", "0a1"])
@pytest.mark.parametrize("draft", ["", "a", "abc", "0abc", "a0bc", "ab1c", "1ab", "01ab", "abcde1"])
@pytest.mark.parametrize("max_tokens", range(5))
@pytest.mark.parametrize("tokens", [BEGUN, MAY_OPEN])
def test_as_much_is_drafted_as_needs_no_end_of_the_reasoning(
    tokens: ReasoningTokens, max_tokens: int, draft: str, text: str
) -> None:
    if any(has_to_close(limiter(tokens, max_tokens, text[:length])) for length in range(len(text))):
        return  # no such output
    matcher = limiter(tokens, max_tokens, text)
    masks = matcher.masks_after(ids(draft))
    assert masks == [None] * len(masks)
    for length in range(1, len(masks) + 1):
        assert not has_to_close(limiter(tokens, max_tokens, text + draft[:length]))
    if tokens is BEGUN and len(masks) < len(draft):
        assert has_to_close(matcher) or has_to_close(limiter(tokens, max_tokens, text + draft[: len(masks) + 1]))


def test_a_grammar_goes_on_after_the_limit() -> None:
    def grammar() -> OutputMatcher:
        return hash_grammars().compile(Grammar(GrammarKind.CHOICE, '["ab", "ac"]', BEGUN)).result().copy()

    matcher = limiter(BEGUN, 2, "xy", grammar())
    assert has_to_close(matcher)
    assert matcher.is_awaited
    assert matcher.masks_after(ids("1a")) == []
    assert matcher.take(CLOSING)
    assert matcher.forced_tokens() == ids("a")
    assert len(matcher.masks_after(ids("ab"))) == 2
    assert all(map(matcher.take, ids("ab")))
    assert matcher.is_complete
    assert not limiter(BEGUN, 2, "xy1", grammar()).take(CHARS.index("z"))
