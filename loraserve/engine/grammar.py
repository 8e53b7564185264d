"""What a request's grammar lets its sequences write: which tokens may come next, and which must."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import numpy as np

from loraserve.engine.errors import EngineRequestError
from loraserve.engine.request import EngineErrorCode, Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

NUM_KEPT = 64
"""Grammars kept as they were compiled: the requests of an application come with the same one again and again."""
COMPILE_STACK_BYTES = 128 * 1024 * 1024
"""Schemas are followed by recursion, into references too: 1,500 levels overflow a thread's usual 8 MB, and 64,000
characters have room for 5,000, which 32 MB suffice for. What is not used takes no memory."""
MAX_LEXER_STATES = 10_000
"""Of one sequence; 1 to 2 KB each."""
STEP_LEXER_FUEL = 50_000
STEP_MAX_ITEMS = 20_000
"""What the mask of one token may cost, which all sequences wait for: 4.5 ms by llguidance's figures."""
WAIT_S = 0.005


class GrammarMatcher:
    """How far a sequence's output has come in its grammar."""

    def __init__(self, matcher: "LLMatcher", num_mask_words: int) -> None:
        self._matcher = matcher
        self._num_mask_words = num_mask_words

    def copy(self) -> "GrammarMatcher":
        return GrammarMatcher(self._matcher.deep_copy(), self._num_mask_words)

    @property
    def error(self) -> str:
        """Why the output cannot go on; "" = it can."""
        return _first_line(self._matcher.get_error())

    @property
    def is_complete(self) -> bool:
        """Whether nothing follows. Where the output may go on or end, EOS is one of the tokens that can come next."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def take(self, token_id: int) -> bool:
        """The output's next token. False: there is an `error`, also from the last mask, which then allows EOS alone."""
        return self._matcher.consume_token(token_id) and not self._matcher.is_error()

    def forced_tokens(self) -> list[int]:
        """What follows whatever the model says, in the tokens that the tokenizer makes of it."""
        return self._matcher.compute_ff_tokens()

    def mask(self) -> np.ndarray:
        """uint8, a bit for each token, the least significant first: 1 = it may come next."""
        mask = np.zeros(self._num_mask_words, np.int32)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return mask.view(np.uint8)


class Grammars:
    """Compiles grammars for one tokenizer, beside the engine's steps."""

    def __init__(self, tokenizer_json: str, eos_token_ids: Sequence[int]) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        default = threading.stack_size(COMPILE_STACK_BYTES)
        try:
            # NOTE: starts the thread.
            self._tokenizer = self._thread.submit(_read_tokenizer, tokenizer_json, list(eos_token_ids))
        finally:
            threading.stack_size(default)
        self._compiled: OrderedDict[Grammar, Future[GrammarMatcher]] = OrderedDict()  # oldest use first

    def compile(self, grammar: Grammar) -> "Future[GrammarMatcher]":
        """Of a sequence without output, to be copied. Its exception is an `EngineRequestError`."""
        if grammar not in self._compiled:
            if len(self._compiled) == NUM_KEPT:
                self._compiled.popitem(last=False)
            self._compiled[grammar] = self._thread.submit(self._compile, grammar)
        self._compiled.move_to_end(grammar)
        return self._compiled[grammar]

    def wait(self) -> None:
        """Up to a few milliseconds, for one that is being compiled."""
        wait([each for each in self._compiled.values() if not each.done()], WAIT_S, FIRST_COMPLETED)

    def _compile(self, grammar: Grammar) -> GrammarMatcher:
        from llguidance import LLMatcher, grammar_from

        tokenizer = self._tokenizer.result()
        try:
            text = grammar_from(grammar.kind.value, grammar.text)
        except ValueError as error:
            raise grammar_refused(str(error)) from error
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=_limits())
        if matcher.is_error():
            raise grammar_refused(matcher.get_error())
        compiled = GrammarMatcher(matcher, -(-tokenizer.vocab_size // 32))
        compiled.mask()  # the first one takes longest
        return compiled


def grammar_refused(reason: str) -> EngineRequestError:
    return EngineRequestError(_first_line(reason), EngineErrorCode.GRAMMAR)


def _first_line(reason: str) -> str:
    """For a person: the parser's state follows in further lines."""
    return reason.partition("\n")[0].strip()


def _read_tokenizer(tokenizer_json: str, eos_token_ids: list[int]) -> "LLTokenizer":
    try:
        from llguidance import LLTokenizer

        return LLTokenizer(tokenizer_json, eos_token=eos_token_ids or None)
    except (ImportError, ValueError, RuntimeError) as error:
        raise grammar_refused(f"not with this model's tokenizer: {error}") from error


def _limits() -> "LLParserLimits":
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_MAX_ITEMS,
        verbose_errors=False,
    )
