"""Grammars whose output may be a tool call instead."""

import json

import numpy as np
import pytest

from loraserve.engine.errors import EngineRequestError
from loraserve.engine.grammars.compiler import Grammars
from loraserve.engine.grammars.matcher import OutputMatcher
from loraserve.engine.request import Grammar, GrammarCalls, GrammarKind, ReasoningTokens

CHARS = 'acefhilmnoprsty"{}[]<>/_:, 012uACLSkg;'
END, CALLS, ARGS, TAG, THINK, ANSWER = range(len(CHARS), len(CHARS) + 6)
ADDED = {"<end>": END, "[CALLS]": CALLS, "[ARGS]": ARGS, "<call>": TAG, "<think>": THINK, "</think>": ANSWER}
SCHEMA = {"x-guidance": {"whitespace_flexible": False}, "type": "object", "properties": {"a": {"enum": [0, 1]}}}
SCHEMA |= {"required": ["a"], "additionalProperties": False}


def grammars() -> Grammars:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    vocab = {"Ġ" if char == " " else char: index for index, char in enumerate(CHARS)}
    usual = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": token_id, "content": text, "special": text != "<call>"} | usual for text, token_id in ADDED.items()]
    model = {"type": "BPE", "vocab": vocab | ADDED, "merges": []}
    tokenizer = {"version": "1.0", "added_tokens": added, "decoder": byte_level, "model": model}
    return Grammars(json.dumps(tokenizer), [END])


def ids(text: str) -> list[int]:
    return [CHARS.index(char) for char in text]


def matcher_of(calls: GrammarCalls, reasoning: ReasoningTokens | None = None) -> OutputMatcher:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA), reasoning=reasoning, calls=calls)
    return grammars().compile(grammar).result()


def takes(matcher: OutputMatcher, token_ids: list[int]) -> bool:
    return all(matcher.take(token_id) for token_id in token_ids)


def allowed(matcher: OutputMatcher) -> set[int]:
    return {*np.flatnonzero(np.unpackbits(matcher.mask(), bitorder="little")).tolist()}


EVERYTHING = {*range(ANSWER + 1)}
OPENINGS = [
    (GrammarCalls("[CALLS]", CALLS), [CALLS, *ids("f"), ARGS, *ids('{"a')]),
    (GrammarCalls("<call>", TAG), [TAG, *ids('{"')]),
    (GrammarCalls("<call>"), ids("<call>{")),
    (GrammarCalls("<call>", TAG), ids("<call>{")),
    (GrammarCalls("[CALLS]", CALLS, ("f", "f_a")), ids('{"name": "f_a", "parameters": {"a": [0]}}')),
    (GrammarCalls("[CALLS]", CALLS, ("f", "f_a")), ids('{"type":"function", "name": "f", "parameters": {}} ;{')),
    (GrammarCalls("[CALLS]", CALLS, ("f", "f_a")), [CALLS, *ids("{")]),
]


@pytest.mark.parametrize(("calls", "beginning"), OPENINGS)
def test_an_output_follows_the_schema_or_is_a_call_in_which_every_token_may_follow(
    calls: GrammarCalls, beginning: list[int]
) -> None:
    matcher = matcher_of(calls)
    answer, call = matcher.copy(), matcher.copy()
    assert takes(answer, ids('{"a":1}'))
    assert answer.is_complete
    assert takes(call, beginning)
    assert allowed(call) == EVERYTHING
    assert not call.is_complete
    assert takes(call, [*ids("mn"), ARGS, TAG, END])


@pytest.mark.parametrize("text", ['{"a":2', "call", "<call>", "[CALLS]", '{"name":"f_'])
def test_nothing_else_is_allowed(text: str) -> None:
    assert not takes(matcher_of(GrammarCalls("{call}", bare_names=("f",))), ids(text))


def test_an_output_begins_with_json_or_a_call_and_not_with_a_blank() -> None:
    matcher = matcher_of(GrammarCalls("[CALLS]", CALLS))
    assert allowed(matcher) == {*ids("{["), CALLS}


def test_a_call_may_follow_reasoning() -> None:
    matcher = matcher_of(GrammarCalls("[CALLS]", CALLS), ReasoningTokens(THINK, ANSWER))
    assert takes(matcher, [THINK, *ids("hm"), ANSWER])
    assert takes(matcher.copy(), [CALLS, *ids("f{")])
    assert takes(matcher, ids('{"a":0}'))


def test_a_schema_that_cannot_be_followed_is_refused_as_without_calls() -> None:
    for calls in (None, GrammarCalls("<call>")):
        refused = grammars().compile(Grammar(GrammarKind.JSON_SCHEMA, '{"not": {"type": "string"}}', calls=calls))
        with pytest.raises(EngineRequestError, match=r'^Unimplemented keys: \["not"\]'):
            refused.result()
