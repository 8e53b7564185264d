"""Grammars over the hash model's tokens, each of which is one character, and plain Python for what they allow."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from loraserve.engine.grammars.compiler import Grammars
from loraserve.engine.request import Grammar, GrammarKind, ReasoningTokens, SamplingParams

VOCAB_SIZE = 30
EOS = 7
CHARS = "abcdefg\0ijklmnopqrstuvwxyz0123"
"""Character of each token id; EOS has none."""


@cache
def hash_grammars() -> Grammars:
    """Shared by all tests, so that each grammar is compiled once."""
    return make_hash_grammars()


def make_hash_grammars() -> Grammars:
    vocab = {char: token_id for token_id, char in enumerate(CHARS) if token_id != EOS} | {"<eos>": EOS}
    added = {"id": EOS, "content": "<eos>", "special": True}
    added |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [added],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    return Grammars(json.dumps(tokenizer), [EOS])


def one_of(*texts: str) -> Grammar:
    return Grammar(GrammarKind.CHOICE, json.dumps(texts))


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(CHARS[token_id] for token_id in token_ids)


def behind(reasoning: ReasoningTokens, grammar: Grammar) -> Grammar:
    return replace(grammar, reasoning=reasoning)


def can_come(params: SamplingParams, token_ids: Sequence[int]) -> list[int]:
    """Token ids that an output with these parameters may have after `token_ids`."""
    limit, grammar = params.reasoning_limit, params.grammar
    if limit is not None and _num_reasoning_tokens(limit.tokens, token_ids) == limit.max_tokens:
        return [limit.tokens.closing_id]
    return [*range(VOCAB_SIZE)] if grammar is None else can_follow(grammar, token_ids)


def _num_reasoning_tokens(tokens: ReasoningTokens, token_ids: Sequence[int]) -> int | None:
    """None = the output is not within its reasoning."""
    start = 0
    if tokens.opening_id is not None:
        if tokens.opening_id not in token_ids[: tokens.opens_within]:
            return None
        start = token_ids.index(tokens.opening_id) + 1
    return None if tokens.closing_id in token_ids[start:] else len(token_ids) - start


def can_follow(grammar: Grammar, token_ids: Sequence[int]) -> list[int]:
    """Token ids allowed after `token_ids`. grammar: a choice of texts."""
    reasoning, answer = grammar.reasoning, replace(grammar, reasoning=None)
    if reasoning is not None and reasoning.opening_id in (None, *token_ids[:1]):
        if reasoning.closing_id not in token_ids:
            return [token_id for token_id in range(VOCAB_SIZE) if token_id != EOS]
        return can_follow(answer, token_ids[token_ids.index(reasoning.closing_id) + 1 :])
    if reasoning is not None and reasoning.opening_id is not None and not token_ids:
        return sorted([*can_follow(answer, token_ids), reasoning.opening_id])
    text, texts = text_of(token_ids), json.loads(grammar.text)
    longer = {each[len(text)] for each in texts if each.startswith(text) and len(each) > len(text)}
    return sorted([CHARS.index(char) for char in longer] + [EOS] * (text in texts))
