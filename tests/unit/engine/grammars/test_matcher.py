import gc
import json
import math
import time
from collections.abc import Iterator
from threading import Event

import numpy as np
import pytest

from loraserve.engine.errors import EngineRequestError
from loraserve.engine.grammars import compiler
from loraserve.engine.grammars import matcher as matching
from loraserve.engine.grammars.compiler import Grammars
from loraserve.engine.grammars.matcher import GrammarMatcher
from loraserve.engine.request import EngineErrorCode, Grammar, GrammarKind
from tests.support.hash_grammars import CHARS, EOS, can_follow, hash_grammars, make_hash_grammars, one_of, text_of


def ids(text: str) -> list[int]:
    return [CHARS.index(char) for char in text]


def matcher_of(grammar: Grammar, text: str = "") -> GrammarMatcher:
    matcher = hash_grammars().compile(grammar).result().copy()
    assert all(matcher.take(token_id) for token_id in ids(text)), matcher.error
    return matcher


def allowed(matcher: GrammarMatcher) -> list[int]:
    return np.flatnonzero(np.unpackbits(matcher.mask(), bitorder="little")).tolist()


def test_the_mask_allows_exactly_the_tokens_that_can_follow() -> None:
    grammar = one_of("abc", "abd", "a", "zz")
    for text in ("", "a", "ab", "z"):
        assert allowed(matcher_of(grammar, text)) == can_follow(grammar, ids(text)), text


@pytest.mark.parametrize(
    ("kind", "text", "start", "expected"),
    [
        (GrammarKind.REGEX, "[ab]{2}0", "a", "ab"),
        (GrammarKind.REGEX, "a/b", "a", None),  # the alphabet has no "/"
        (GrammarKind.GRAMMAR, 'start: "ab" | "ac" tail\ntail: "d"+', "ac", "d"),
        (GrammarKind.GRAMMAR, '?start: "ab" | tail\n?tail: "c"+', "c", "c"),
        (GrammarKind.GRAMMAR, 'root ::= ("a" | "b") "c"', "", "ab"),
        (GrammarKind.JSON_SCHEMA, '{"type": "integer"}', "1", "0123"),
    ],
)
def test_each_kind_of_grammar_allows_the_expected_tokens(
    kind: GrammarKind, text: str, start: str, expected: str | None
) -> None:
    found = allowed(matcher_of(Grammar(kind, text), start))
    if expected is not None:
        assert {CHARS[token_id] for token_id in found if token_id != EOS} == set(expected), found


def test_a_choice_of_thousands_of_texts_allows_the_expected_tokens() -> None:
    texts = [f"{CHARS[index % 7]}{index % 4}{text_of(divmod(index, 26))}" for index in range(600)]
    texts = sorted({text.replace("\0", "z") for text in texts})
    grammar = one_of(*(text + tail for text in texts for tail in ("", "ab", "ac", "x", "yz")))
    for start in ("", texts[0], texts[0] + "a"):
        assert allowed(matcher_of(grammar, start)) == can_follow(grammar, ids(start))


def test_a_matcher_is_complete_when_nothing_can_follow() -> None:
    grammar = one_of("ab", "abc")
    assert not matcher_of(grammar, "a").is_complete
    assert not matcher_of(grammar, "ab").is_complete, "c may follow"
    assert matcher_of(grammar, "abc").is_complete
    ended = matcher_of(grammar, "ab")
    assert ended.take(EOS)
    assert ended.is_complete


def test_forced_tokens_are_those_without_an_alternative() -> None:
    assert matcher_of(one_of("abc", "xyz"), "a").forced_tokens() == ids("bc")
    assert matcher_of(one_of("abc", "abd"), "a").forced_tokens() == ids("b")
    assert matcher_of(one_of("abc", "ab"), "a").forced_tokens() == ids("b")
    assert matcher_of(one_of("abc", "xyz")).forced_tokens() == []


def test_a_token_that_cannot_follow_is_an_error() -> None:
    matcher = matcher_of(one_of("ab"), "a")
    assert not matcher.take(CHARS.index("c"))
    assert matcher.error
    assert not matcher.is_complete


def test_eos_is_not_taken_after_an_error_although_the_mask_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MAX_LEXER_STATES", 40)
    matcher = make_hash_grammars().compile(Grammar(GrammarKind.REGEX, "([ab]{0,50}c){20}")).result()
    for token_id in ids("caaaabbccacbbcbbc"):
        matcher.mask()
        assert matcher.take(token_id)
    assert allowed(matcher) == [EOS]
    assert not matcher.take(EOS)


def test_masks_after_a_draft_equal_those_after_taking_its_tokens() -> None:
    grammar = one_of("abcde0", "abxyz", "abcdi0")
    matcher, beside = matcher_of(grammar), matcher_of(grammar)
    draft = ids("abcdi")
    masks = matcher.masks_after(draft)
    for token_id, mask in zip(draft, masks, strict=True):
        assert beside.take(token_id)
        assert np.array_equal(mask, beside.mask())
    assert np.array_equal(matcher.mask(), matcher_of(grammar).mask()), "it has not moved"


@pytest.mark.parametrize(("text", "num_allowed"), [("abz", 2), ("zab", 0), ("abcde0ab", 6), ("", 0)])
def test_a_draft_ends_where_the_grammar_does_not_allow_it(text: str, num_allowed: int) -> None:
    assert len(matcher_of(one_of("abcde0", "abxyz")).masks_after(ids(text))) == num_allowed


def test_nothing_is_drafted_after_half_of_the_time_is_used() -> None:
    matcher = matcher_of(one_of("abcde"))
    matcher._spent_s = 0.49 * matching.FREE_S
    assert len(matcher.masks_after(ids("a"))) == 1
    matcher._spent_s = 0.51 * matching.FREE_S
    assert matcher.masks_after(ids("a")) == []


def test_copies_are_independent() -> None:
    first = matcher_of(one_of("ab", "ac"), "a")
    second = first.copy()
    assert first.take(CHARS.index("b"))
    assert first.is_complete
    assert not second.is_complete
    assert second.take(CHARS.index("c"))


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar(GrammarKind.REGEX, "(a"), "regex parse error"),
        (Grammar(GrammarKind.GRAMMAR, "start: nosuch"), "nosuch"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"type": "nosuch"}'), "nosuch"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"$ref": "https://example.com/x"}'), "example.com"),
    ],
)
def test_invalid_or_unsupported_grammars_are_refused_with_the_reason(grammar: Grammar, message: str) -> None:
    with pytest.raises(EngineRequestError, match=message) as refused:
        hash_grammars().compile(grammar).result()
    assert refused.value.code is EngineErrorCode.GRAMMAR
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("key", ["allOf", "anyOf", "oneOf"])
def test_a_schema_with_references_as_deep_as_its_length_allows_compiles(key: str) -> None:
    opening, closing = f'{{"{key}":[' * 55, "]}" * 55
    definitions = [f'{opening}{{"$ref": "#/$defs/{place + 1}"}}{closing}' for place in range(90)]
    schema = f'{{"$ref": "#/$defs/0", "$defs": [{",".join(definitions)}, {{"type": "integer"}}]}}'
    assert 60_000 < len(schema) < 65_536
    assert matcher_of(Grammar(GrammarKind.JSON_SCHEMA, schema)).error == ""


def test_an_unreadable_tokenizer_fails_only_when_a_grammar_is_compiled() -> None:
    grammars = Grammars('{"model": {"type": "nosuch"}}', [EOS])
    with pytest.raises(EngineRequestError, match="this model's tokenizer is not supported"):
        grammars.compile(one_of("a")).result()


def test_a_grammar_is_compiled_once_while_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "NUM_KEPT", 2)
    grammars = make_hash_grammars()
    first, second = grammars.compile(one_of("a")), grammars.compile(one_of("b"))
    assert grammars.compile(one_of("a")) is first
    grammars.compile(one_of("c"))  # evicts b, the least recently used
    assert grammars.compile(one_of("a")) is first
    assert grammars.compile(one_of("b")) is not second


def test_least_recently_used_grammars_are_dropped_if_the_kept_ones_took_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grammars = hash_grammars.__wrapped__()
    first, second = grammars.compile(one_of("a")), grammars.compile(one_of("b"))
    monkeypatch.setattr(compiler, "KEPT_S", first.result().use.spent_s + second.result().use.spent_s)
    grammars.forget_costly()
    assert grammars.compile(one_of("a")) is first
    monkeypatch.setattr(compiler, "KEPT_S", 1.001 * first.result().use.spent_s)
    grammars.forget_costly()
    assert grammars.compile(one_of("a")) is first
    assert grammars.compile(one_of("b")) is not second, "used longest ago"


def test_a_grammar_that_took_too_much_time_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = hash_grammars.__wrapped__()
    first = grammars.compile(one_of("ab"))
    copy = first.result().copy()
    monkeypatch.setattr(compiler, "RENEW_S", first.result().use.spent_s)
    assert grammars.compile(one_of("ab")) is first
    copy.mask()
    assert grammars.compile(one_of("ab")) is not first


def test_grammars_are_kept_and_forgotten_per_tenant() -> None:
    grammars = hash_grammars.__wrapped__()
    first = grammars.compile(one_of("a"), "first")
    second = grammars.compile(one_of("a"), "second")
    assert first is not second
    grammars.forget(one_of("a"), "first")
    assert grammars.compile(one_of("a"), "first") is not first
    assert grammars.compile(one_of("a"), "second") is second


def test_strings_with_a_max_length_stay_within_the_limit_of_states() -> None:
    properties = {name: {"type": "string", "maxLength": 2000} for name in "abc"}
    schema = json.dumps({"type": "object", "properties": properties})
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"end": 256}
    model = {"type": "BPE", "byte_fallback": True, "vocab": vocab, "merges": []}
    tokenizer = {"version": "1.0", "added_tokens": [], "decoder": {"type": "ByteFallback"}, "model": model}
    found = Grammars(json.dumps(tokenizer), [256]).compile(Grammar(GrammarKind.JSON_SCHEMA, schema)).result().copy()
    for byte in b'{"a":"' + b"word " * 399 + b'","b":"' + b"word " * 399 + b'","c":"':
        found.mask()
        assert found.take(byte), found.error


def test_a_cancelled_grammar_is_compiled_for_the_next_caller() -> None:
    grammars, is_free = hash_grammars.__wrapped__(), Event()
    grammars._thread.submit(is_free.wait)
    cancelled = grammars.compile(one_of("a"))
    assert cancelled.cancel()
    grammars.forget_costly()
    again = grammars.compile(one_of("a"))
    is_free.set()
    assert allowed(again.result()) == ids("a")


def test_tenants_take_turns_at_having_a_grammar_compiled() -> None:
    grammars, is_free, order = hash_grammars.__wrapped__(), Event(), list[str]()
    grammars._thread.submit(is_free.wait)
    for name, tenant in (("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"), ("c1", "c"), ("b2", "b")):
        grammars.compile(one_of(name), tenant).add_done_callback(lambda _, name=name: order.append(name))
    grammars.compile(one_of("a2"), "a").cancel()
    is_free.set()
    grammars._thread.shutdown()
    assert order == ["a2", "a1", "b1", "c1", "b2", "a3"], "cancelled at once, then in turn"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": ".*" * 30_000},
        {"properties": {f"p{place}": {"type": "integer", "multipleOf": 9000 + place} for place in range(1000)}},
    ],
)
def test_a_schema_that_takes_too_long_to_compile_is_refused(schema: dict[str, object]) -> None:
    with pytest.raises(EngineRequestError, match=r"too big|fuel"):
        hash_grammars().compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))).result()


def test_a_schema_that_allows_nothing_is_refused_when_it_is_compiled() -> None:
    with pytest.raises(EngineRequestError):
        hash_grammars().compile(Grammar(GrammarKind.JSON_SCHEMA, '{"$ref": "#"}')).result()


def test_overly_ambiguous_rules_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "FREE_S", math.inf)  # a busy machine would reach the time limit first
    matcher = matcher_of(Grammar(GrammarKind.GRAMMAR, 'start: s\ns: s s | s s s | "a" | ""'))
    while matcher.take(CHARS.index("a")):
        allowed(matcher)
    assert "items" in matcher.error
    assert "\n" not in matcher.error


@pytest.mark.parametrize("text", ["a", "ab"])
def test_exceeding_the_time_limit_is_an_error_and_not_completion(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    matcher = matcher_of(one_of(text))
    monkeypatch.setattr(matching, "FREE_S", 0.0)
    monkeypatch.setattr(matching, "TOKEN_S", 0.0)
    assert not matcher.take(CHARS.index("a"))
    assert matcher.error == matching.TOO_SLOW
    assert not matcher.is_complete


@pytest.fixture
def slow_collections(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Collects garbage as often as possible; each collection takes as long as an output's grammar may take in total."""
    now_s, thresholds = 0.0, gc.get_threshold()

    def note(phase: str, _: dict[str, int]) -> None:
        nonlocal now_s
        now_s += (phase == "stop") * matching.FREE_S

    monkeypatch.setattr(time, "thread_time", lambda: now_s)
    gc.callbacks.append(note)
    gc.set_threshold(1, 1000, 1000)
    yield
    gc.set_threshold(*thresholds)
    gc.callbacks.remove(note)


@pytest.mark.usefixtures("slow_collections")
def test_garbage_collection_is_not_counted_as_a_grammars_time() -> None:
    matcher = matcher_of(one_of("abcde", "abcdi"))
    for token_id in ids("abcd"):
        assert allowed(matcher) == [token_id]
        assert matcher.masks_after([token_id])
        assert matcher.forced_tokens()
        assert matcher.take(token_id), matcher.error
    assert matcher._spent_s == 0
    assert gc.isenabled()


def test_a_disabled_garbage_collector_stays_disabled() -> None:
    gc.disable()
    try:
        assert allowed(matcher_of(one_of("a"), "a")) == [EOS]
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_exceeding_the_limit_of_lexer_states_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MAX_LEXER_STATES", 50)
    matcher = make_hash_grammars().compile(Grammar(GrammarKind.REGEX, "([ab]{0,50}c){20}")).result()
    for _ in range(100):
        (token_id, *_) = allowed(matcher)
        if not matcher.take(token_id):
            break
    assert "too many states" in matcher.error
    assert not matcher.is_complete


def test_tokens_of_several_characters_are_allowed() -> None:
    vocab = {char: index for index, char in enumerate("abc")} | {"ab": 3, "abc": 4}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model = {"type": "BPE", "vocab": vocab, "merges": [["a", "b"], ["ab", "c"]]}
    grammars = Grammars(json.dumps({"version": "1.0", "added_tokens": [], "decoder": byte_level, "model": model}), [2])
    found = grammars.compile(Grammar(GrammarKind.CHOICE, '["abab", "b"]')).result()
    assert allowed(found) == [0, 1, 3]


@pytest.mark.parametrize("is_special", [False, True])
def test_text_that_reads_like_an_added_token_is_spelled_with_other_tokens(is_special: bool) -> None:
    """llguidance tokenizes such text as the added token, which it then does not accept as text."""
    vocab = {char: index for index, char in enumerate("abc<>")} | {"<b": 5, "<b>": 6, "end": 7}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model = {"type": "BPE", "vocab": vocab, "merges": [["<", "b"]]}
    added = {"id": 6, "content": "<b>", "special": is_special}
    added |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {"version": "1.0", "added_tokens": [added], "decoder": byte_level, "model": model}
    grammars = Grammars(json.dumps(tokenizer), [7])
    of_text = grammars.compile(Grammar(GrammarKind.REGEX, "a<b>c[ab]")).result()
    assert of_text.forced_tokens() == [0]
    assert of_text.take(0)
    assert allowed(of_text) == [5]
    assert of_text.masks_after([5])
    assert of_text.take(5)
    assert of_text.forced_tokens() == [4, 2]
    assert of_text.take(4)
    assert of_text.take(2)
    assert allowed(of_text) == [0, 1]
    of_token = grammars.compile(Grammar(GrammarKind.GRAMMAR, 'start: "a" <b> "c"')).result()
    assert of_token.forced_tokens() == [0, 6, 2]
    assert of_token.take(0)
    assert allowed(of_token) == [6]
