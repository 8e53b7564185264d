"""Compiles the grammars that constrain outputs, in a thread that runs in parallel with the engine's steps."""

import json
import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from loraserve.engine.errors import EngineRequestError
from loraserve.engine.grammars.matcher import GrammarMatcher, GrammarUse, OutputMatcher, first_line
from loraserve.engine.grammars.reasoning import ReasoningMatcher
from loraserve.engine.request import EngineErrorCode, Grammar, GrammarCalls, GrammarKind, GrammarMark

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer

NUM_KEPT = 64
"""Number of compiled grammars kept: an application's requests use the same ones again and again."""
KEPT_S = 1.0
"""Time that all kept grammars together may have taken, to compile and since: one second produces up to 400 MB."""
COMPILE_FUEL = 100_000
"""Twice what a schema of 200 fields with 4,000 enum values takes. With ten times as much, a schema of 64,000 characters
took 40 s and 2 GB."""
COMPILE_STACK_BYTES = 128 * 1024 * 1024
"""Schemas are traversed recursively, also into references: 1,500 levels overflow a thread's usual 8 MB. A schema of
64,000 characters has room for 5,000 levels, for which 32 MB suffice. Unused stack takes no memory."""
MAX_LEXER_STATES = 100_000
"""Most states of a compiled grammar, which all its copies share; 0.3 to 1.3 KB each. Strings with a `maxLength` have
nine states per character."""
RENEW_S = 0.25
"""Time that a kept grammar and its copies may take before the next request compiles it again, without its states."""
STEP_LEXER_FUEL = 50_000
STEP_MAX_ITEMS = 20_000
"""Limits of the cost of one token's mask, which all sequences wait for: 4.5 ms by llguidance's figures."""
MAX_ROW_ITEMS = 500
"""How many rules of a grammar the output so far may be in the middle of. With ambiguous grammars, the time per token
grows with the square of this: 600 ms at 2,000, which is llguidance's limit."""
INLINED_START = re.compile(r"(?m)^\s*\?start\s*:")
"""Lark's syntax, as in many grammars for the Lark library. llguidance recognizes it only by a rule `start`."""
WAIT_S = 0.005


class Grammars:
    """Compiles grammars for one tokenizer, in parallel with the engine's steps: one of each tenant in turn."""

    def __init__(self, tokenizer_json: str, ending_ids: Sequence[int]) -> None:
        """ending_ids: tokens that end an output: EOS, and those that end a turn of a chat template."""
        self._ending_ids = ending_ids
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        default = threading.stack_size(COMPILE_STACK_BYTES)
        try:
            # NOTE: this starts the thread, which gets the stack size set above.
            self._tokenizer = self._thread.submit(_read_tokenizer, tokenizer_json, list(ending_ids))
        finally:
            threading.stack_size(default)
        self._compiled: OrderedDict[tuple[str, Grammar], Future[OutputMatcher]] = OrderedDict()
        """By tenant, so that no tenant uses up another's states. Least recently used first."""
        self._waiting: OrderedDict[str, deque[tuple[Grammar, Future[OutputMatcher]]]] = OrderedDict()
        """By tenant, in the order of their turns."""
        self._waiting_lock = threading.Lock()

    def compile(self, grammar: Grammar, tenant: str = "") -> "Future[OutputMatcher]":
        """The matcher of an empty output, to be copied for each sequence. The future's exception is an
        `EngineRequestError`.

        A caller that no longer needs the future may cancel it if it was given to no other caller.
        """
        key = tenant, grammar
        kept = self._compiled.get(key)
        if kept is None or kept.cancelled() or _spent_s(kept) > RENEW_S:
            if kept is None and len(self._compiled) == NUM_KEPT:
                self._compiled.popitem(last=False)
            self._compiled[key] = self._queue(grammar, tenant)
        self._compiled.move_to_end(key)
        return self._compiled[key]

    def forget(self, grammar: Grammar, tenant: str) -> None:
        """Stop keeping a grammar whose copies end in errors."""
        self._compiled.pop((tenant, grammar), None)

    def forget_costly(self) -> None:
        """Stop keeping grammars that take too much time. To be called whenever one was compiled."""
        spent_s = {key: _spent_s(compiled) for key, compiled in self._compiled.items()}
        total_s = sum(spent_s.values())
        for key, each_s in spent_s.items():
            if each_s > RENEW_S or total_s > KEPT_S:
                del self._compiled[key]
                total_s -= each_s

    def wait(self, compiling: Iterable[Future[OutputMatcher]]) -> None:
        """Wait for the first of them, a few milliseconds at most."""
        wait(compiling, WAIT_S, FIRST_COMPLETED)

    def _queue(self, grammar: Grammar, tenant: str) -> "Future[OutputMatcher]":
        compiled: Future[OutputMatcher] = Future()
        with self._waiting_lock:
            self._waiting.setdefault(tenant, deque()).append((grammar, compiled))
        self._thread.submit(self._compile_next)
        return compiled

    def _compile_next(self) -> None:
        with self._waiting_lock:
            tenant, waiting = self._waiting.popitem(last=False)
            grammar, compiled = waiting.popleft()
            if waiting:
                self._waiting[tenant] = waiting  # after the others
        if not compiled.set_running_or_notify_cancel():
            return
        try:
            compiled.set_result(self._compile(grammar))
        except BaseException as error:
            compiled.set_exception(error)

    def _compile(self, grammar: Grammar) -> OutputMatcher:
        from llguidance import LLMatcher

        tokenizer = self._tokenizer.result()
        began_s = time.thread_time()
        matcher = LLMatcher(tokenizer, _for_llguidance(grammar), log_level=0, limits=_limits(grammar.kind))
        if matcher.is_error():
            raise grammar_refused(matcher.get_error())
        compiled = GrammarMatcher(matcher, tokenizer, GrammarUse())
        compiled.mask()  # the first mask takes longest
        if matcher.is_error():
            raise grammar_refused(matcher.get_error())
        compiled.use.spent_s = time.thread_time() - began_s
        if grammar.reasoning is None:
            return compiled
        free_mask = _mask_without(self._ending_ids, tokenizer.vocab_size)
        return ReasoningMatcher(compiled, grammar.reasoning, free_mask)


def _mask_without(token_ids: Sequence[int], vocab_size: int) -> NDArray[np.uint8]:
    """A mask, as in `OutputMatcher`, that allows all other tokens."""
    allowed = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    allowed[:vocab_size] = 1
    allowed[[token_id for token_id in token_ids if token_id < vocab_size]] = 0
    return np.packbits(allowed, bitorder="little")


def _for_llguidance(grammar: Grammar) -> str:
    """Raises `EngineRequestError`."""
    from llguidance import grammar_from

    if grammar.kind is GrammarKind.CHOICE:
        # One terminal, because the number of rules that may begin at once is limited.
        return f"start: TEXT\nTEXT: {' | '.join(map(json.dumps, json.loads(grammar.text)))}"
    if grammar.calls is not None:
        assert grammar.kind is GrammarKind.JSON_SCHEMA
        return _answer_or_calls(grammar.text, grammar.calls)
    if grammar.kind is GrammarKind.LARK:
        return grammar_from("lark", "\n".join([grammar.text, *_rules_of(grammar.marks)]))
    is_lark = grammar.kind is GrammarKind.GRAMMAR and INLINED_START.search(grammar.text) is not None
    try:
        return grammar_from("lark" if is_lark else grammar.kind.value, grammar.text)
    except ValueError as error:
        raise grammar_refused(str(error)) from error


def _answer_or_calls(schema: str, calls: GrammarCalls) -> str:
    """No blank may come first, as before JSON: if only a call could follow it, models that begin with one would call.

    In Lark's syntax, JSON's strings are texts, and <[*]> is any token, also a special one.
    """
    rules = [
        "start: @answer | call any*",
        f"call: {_mark(calls.opening, calls.opening_id)}",
        "any: <[*]>",
    ]
    grammars = [f'{{"name": "answer", "json_schema": {schema}}}']
    if calls.bare_names:
        rules[0] += " | @bare_call any*"
        grammars.append(json.dumps({"name": "bare_call", "json_schema": _bare_call(calls.bare_names)}))
    lark = json.dumps({"lark_grammar": "\n".join(rules)})
    return f'{{"grammars": [{", ".join([lark, *grammars])}]}}'


def _rules_of(marks: Sequence[GrammarMark]) -> list[str]:
    return [f"mark_{index}: {_mark(mark.text, mark.token_id)}" for index, mark in enumerate(marks)]


def _mark(text: str, token_id: int | None) -> str:
    return json.dumps(text) if token_id is None else f"{json.dumps(text)} | <[{token_id}]>"


def _bare_call(names: Sequence[str]) -> dict[str, object]:
    properties = {"type": {"const": "function"}, "name": {"enum": list(names)}, "parameters": {"type": "object"}}
    return {"type": "object", "properties": properties, "required": ["name", "parameters"]}


def grammar_refused(reason: str) -> EngineRequestError:
    return EngineRequestError(first_line(reason), EngineErrorCode.GRAMMAR)


def _spent_s(compiled: "Future[OutputMatcher]") -> float:
    """0 while it is not known, or if there is no grammar to keep."""
    is_kept = compiled.done() and not compiled.cancelled() and compiled.exception() is None
    return compiled.result().use.spent_s if is_kept else 0.0


def _read_tokenizer(tokenizer_json: str, ending_ids: list[int]) -> "LLTokenizer":
    try:
        from llguidance import LLTokenizer

        return LLTokenizer(tokenizer_json, eos_token=ending_ids or None)
    except (ImportError, ValueError, RuntimeError) as error:
        raise grammar_refused(f"this model's tokenizer is not supported: {error}") from error


def _limits(kind: GrammarKind) -> "LLParserLimits":
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=MAX_ROW_ITEMS if kind is GrammarKind.GRAMMAR else None,
        initial_lexer_fuel=COMPILE_FUEL,
        max_lexer_states=MAX_LEXER_STATES,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_MAX_ITEMS,
        verbose_errors=False,
    )
