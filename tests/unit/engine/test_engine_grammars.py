"""Requests whose outputs follow a grammar, in an engine whose model is a hash."""

import json
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain

import pytest

from loraserve.engine.engine import Engine
from loraserve.engine.grammars.compiler import Grammars, grammar_refused
from loraserve.engine.grammars.matcher import GrammarMatcher
from loraserve.engine.request import (
    EngineErrorCode,
    EngineRequest,
    FinishReason,
    Grammar,
    GrammarKind,
    ReasoningLimit,
    ReasoningTokens,
    SamplingParams,
)
from tests.support.delayed_accelerator import DelayedAccelerator
from tests.support.hash_grammars import CHARS, EOS, behind, hash_grammars, make_hash_grammars, one_of, text_of
from tests.support.hash_model import BASE, HashRunner, expected_choice, make_hash_engine, run_to_idle

TEXTS = ("abc", "abd", "bab", "zzzzzz", "b")
HELD = one_of(*TEXTS)
BEGUN, MAY_OPEN, OPENS_LATE = ReasoningTokens(None, 3), ReasoningTokens(1, 3), ReasoningTokens(1, 3, opens_within=2)
THINKING, MAYBE_THINKING = behind(BEGUN, HELD), behind(MAY_OPEN, HELD)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, grammar=HELD)


class SlowGrammars(Grammars):
    """Compiles a grammar only when `finish` is called."""

    def __init__(self) -> None:
        self.futures: dict[Grammar, Future[GrammarMatcher]] = {}
        self.waits: list[list[Future[GrammarMatcher]]] = []

    def compile(self, grammar: Grammar, tenant: str = "") -> Future[GrammarMatcher]:
        return self.futures.setdefault(grammar, Future())

    def finish(self, grammar: Grammar) -> None:
        if self.futures[grammar].set_running_or_notify_cancel():
            self.futures[grammar].set_result(hash_grammars().compile(grammar).result())

    def forget(self, grammar: Grammar, tenant: str) -> None:
        del self.futures[grammar]

    def forget_costly(self) -> None:
        """Does nothing: no other thread would compile them again."""

    def wait(self, compiling: Iterable[Future[GrammarMatcher]]) -> None:
        self.waits.append(list(compiling))


@pytest.fixture(params=["host", "device"])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, HashRunner]:
    for grammar in (HELD, THINKING, MAYBE_THINKING):
        hash_grammars().compile(grammar).result()
    return make_hash_engine(monkeypatch, accelerator=DelayedAccelerator() if request.param == "device" else None)


@pytest.fixture
def engine(parts: tuple[Engine, HashRunner]) -> Engine:
    return parts[0]


@pytest.fixture
def grammars(engine: Engine) -> SlowGrammars:
    engine._grammars = SlowGrammars()
    return engine._grammars


def ask(request_id: str, params: SamplingParams = GREEDY, prompt: int = 1) -> EngineRequest:
    return EngineRequest(request_id, [prompt, 2, 3], params)


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        replace(GREEDY, temperature=1.0),
        replace(GREEDY, temperature=1.0, repetition_penalty=1.5, top_k=3),
        replace(GREEDY, max_tokens=3),
        replace(GREEDY, min_tokens=5),
        replace(GREEDY, stop_token_ids=(25,)),
        replace(GREEDY, temperature=1.0, max_tokens=40, grammar=THINKING),
        replace(GREEDY, temperature=1.0, max_tokens=40, grammar=MAYBE_THINKING, min_tokens=9),
        replace(GREEDY, temperature=1.0, grammar=THINKING, stop_token_ids=(25, 3, 4)),
        replace(GREEDY, grammar=None, ignore_eos=True, reasoning_limit=ReasoningLimit(BEGUN, 0)),
        replace(GREEDY, grammar=None, ignore_eos=True, reasoning_limit=ReasoningLimit(BEGUN, 3)),
        replace(GREEDY, grammar=None, temperature=1.0, reasoning_limit=ReasoningLimit(BEGUN, 5), min_tokens=9),
        replace(GREEDY, grammar=None, logit_bias={1: 9.0}, reasoning_limit=ReasoningLimit(MAY_OPEN, 0)),
        replace(
            GREEDY, grammar=None, logit_bias={1: 4.0}, reasoning_limit=ReasoningLimit(MAY_OPEN, 4), temperature=1.0
        ),
        replace(GREEDY, grammar=None, logit_bias={1: 4.0}, reasoning_limit=ReasoningLimit(OPENS_LATE, 3), seed=4),
        replace(
            GREEDY, grammar=None, allowed_token_ids=(3, 5, 6), reasoning_limit=ReasoningLimit(BEGUN, 2), max_tokens=6
        ),
        replace(GREEDY, grammar=THINKING, reasoning_limit=ReasoningLimit(BEGUN, 4), temperature=1.0, max_tokens=30),
        replace(GREEDY, grammar=MAYBE_THINKING, reasoning_limit=ReasoningLimit(MAY_OPEN, 1), temperature=1.0),
    ],
)
def test_tokens_are_chosen_among_those_that_the_grammar_allows(
    engine: Engine, params: SamplingParams, logprobs: int | None, num_choices: int
) -> None:
    params = replace(params, logprobs=logprobs, n=num_choices)
    requests = [ask(str(seed), replace(params, seed=seed), prompt=seed) for seed in range(6)]
    for request in requests:
        engine.add_request(request)
    answers = run_to_idle(engine)
    for request in requests:
        for index in range(num_choices):
            assert answers[request.request_id, index] == expected_choice(request, index, BASE)
    engine.check_invariants()


def test_outputs_match_the_grammar_and_end_with_it(engine: Engine) -> None:
    for seed in range(12):
        engine.add_request(ask(str(seed), replace(GREEDY, temperature=1.0, seed=seed), prompt=seed))
    answers = run_to_idle(engine)
    texts = [text_of([token_id for token_id in each.token_ids if token_id != EOS]) for each in answers.values()]
    assert set(texts) <= set(TEXTS)
    assert len(set(texts)) > 1
    assert {each.finish_reason for each in answers.values()} == {FinishReason.STOP}


@pytest.mark.parametrize("grammar", [THINKING, MAYBE_THINKING])
def test_outputs_after_reasoning_match_the_grammar(engine: Engine, grammar: Grammar) -> None:
    params, reasoning = replace(GREEDY, temperature=1.0, max_tokens=40, grammar=grammar), grammar.reasoning
    assert reasoning is not None
    for seed in range(24):
        engine.add_request(ask(str(seed), replace(params, seed=seed, logit_bias={3: 2.0}), prompt=seed))
    ended = [each for each in run_to_idle(engine).values() if each.finish_reason is FinishReason.STOP]
    num_thought = 0
    for each in ended:
        token_ids = [token_id for token_id in each.token_ids if token_id != EOS]
        if reasoning.opening_id in (None, token_ids[0]):
            num_thought += 1
            token_ids = token_ids[token_ids.index(3) + 1 :]
        assert text_of(token_ids) in TEXTS
    assert num_thought > 4
    assert (num_thought == len(ended)) == (grammar is THINKING)


def test_forced_tokens_take_no_steps_of_their_own(engine: Engine) -> None:
    params = replace(GREEDY, grammar=one_of("abcdefg", "xyz0123"))
    engine.add_request(ask("forced", params))
    engine.add_request(ask("sampled", replace(params, logprobs=0)))
    answers: dict[str, list[list[int]]] = {"forced": [], "sampled": []}
    while engine.has_work():
        for output in engine.step():
            answers[output.request_id].append(output.token_ids)
    assert [len(token_ids) for token_ids in answers["forced"]] == [7]
    assert [len(token_ids) for token_ids in answers["sampled"]] == [1] * 7
    assert [*chain(*answers["forced"])] == [*chain(*answers["sampled"])]


@pytest.mark.parametrize("logprobs", [None, 0])
@pytest.mark.parametrize("is_on_device", [False, True])
def test_a_token_without_an_embedding_is_never_generated(
    monkeypatch: pytest.MonkeyPatch, is_on_device: bool, logprobs: int | None
) -> None:
    """A tokenizer may have more tokens than the model has embeddings to compute them from."""
    num_tokens, grammar = CHARS.index("z"), one_of("uvwxyz0")
    hash_grammars().compile(grammar).result()
    monkeypatch.setattr("tests.support.hash_model.VOCAB_SIZE", num_tokens)
    engine, _ = make_hash_engine(monkeypatch, accelerator=DelayedAccelerator() if is_on_device else None)
    engine.add_request(ask("r", replace(GREEDY, grammar=grammar, logprobs=logprobs)))
    choice = run_to_idle(engine)["r", 0]
    assert choice.token_ids == list(range(num_tokens - 5, num_tokens))
    assert (choice.finish_reason, choice.error_code) == (FinishReason.ERROR, EngineErrorCode.GRAMMAR)
    assert (
        choice.error == "the grammar requires token 25 next, but the model has embeddings only for token ids below 25"
    )
    engine.check_invariants()


def test_forced_tokens_count_for_penalties(engine: Engine) -> None:
    """The first "b" is forced; then "b" competes with tokens that occurred less often."""
    grammar = one_of("abca", "abcb", "abcd", "abcbca", "abcbcb", "abcbcd")
    hash_grammars().compile(grammar).result()
    params = replace(GREEDY, temperature=1.0, frequency_penalty=2.0, grammar=grammar)
    requests = [ask(str(seed), replace(params, seed=seed), prompt=seed % 20) for seed in range(40)]
    for request in requests:
        engine.add_request(request)
    answers = run_to_idle(engine)
    for request in requests:
        assert answers[request.request_id, 0] == expected_choice(request, 0, BASE)


def test_a_grammar_does_not_affect_other_requests_in_the_batch(engine: Engine) -> None:
    free = replace(GREEDY, grammar=None, ignore_eos=True)
    engine.add_request(ask("free", free))
    engine.add_request(ask("held"))
    engine.add_request(ask("drawn", replace(free, temperature=1.0)))
    answers = run_to_idle(engine)
    for request_id, params in (("free", free), ("drawn", replace(free, temperature=1.0))):
        assert answers[request_id, 0] == expected_choice(ask(request_id, params), 0, BASE)


def test_a_device_runs_ahead_again_after_the_last_constrained_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = make_hash_engine(monkeypatch, accelerator=DelayedAccelerator())
    hash_grammars().compile(one_of("abcabd")).result()
    held = SamplingParams(max_tokens=6, temperature=0.0, grammar=one_of("abcabd"), logprobs=0)
    engine.add_request(ask("held", held))
    run_to_idle(engine)
    assert runner.num_ahead == 0, "the mask of a token depends on the token before"
    engine.add_request(ask("free", SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)))
    run_to_idle(engine)
    assert runner.num_ahead > 0


def test_reasoning_ends_at_its_limit_and_the_output_goes_on(engine: Engine) -> None:
    params = SamplingParams(20, temperature=1.0, ignore_eos=True, reasoning_limit=ReasoningLimit(BEGUN, 6))
    requests = [ask(str(seed), replace(params, seed=seed), prompt=seed) for seed in range(12)]
    for request in requests:
        engine.add_request(request)
    ends = [choice.token_ids.index(3) for choice in run_to_idle(engine).values()]
    assert max(ends) == 6
    assert min(ends) < 6, "reasoning may also end by itself"


def test_a_limit_of_reasoning_takes_no_step_of_its_own_unless_logprobs_are_requested(engine: Engine) -> None:
    params = SamplingParams(5, temperature=0.0, ignore_eos=True, reasoning_limit=ReasoningLimit(BEGUN, 2))
    engine.add_request(ask("forced", replace(params, logit_bias={3: -100.0})))
    engine.add_request(ask("sampled", replace(params, logit_bias={3: -100.0}, logprobs=0)))
    steps: dict[str, list[int]] = {"forced": [], "sampled": []}
    while engine.has_work():
        for output in engine.step():
            steps[output.request_id].append(len(output.token_ids))
    assert steps == {"forced": [1, 2, 1, 1], "sampled": [1] * 5}


@pytest.mark.parametrize("tokens", [BEGUN, MAY_OPEN])
def test_a_device_waits_only_for_the_token_before_the_limit(
    monkeypatch: pytest.MonkeyPatch, tokens: ReasoningTokens
) -> None:
    engine, runner = make_hash_engine(monkeypatch, accelerator=DelayedAccelerator())
    limit = ReasoningLimit(tokens, 10)
    params = SamplingParams(20, temperature=0.0, ignore_eos=True, reasoning_limit=limit, logit_bias={3: -100.0, 1: 5.0})
    engine.add_request(ask("r", params))
    answer = run_to_idle(engine)["r", 0]
    assert answer == expected_choice(ask("r", params), 0, BASE)
    assert answer.token_ids.index(3) == 10 + (tokens is MAY_OPEN)
    assert runner.num_ahead >= 15


def test_other_requests_run_while_a_grammar_is_compiled(engine: Engine, grammars: SlowGrammars) -> None:
    free = replace(GREEDY, grammar=None, ignore_eos=True)
    engine.add_request(ask("held"))
    engine.add_request(ask("free", free))
    assert engine.stats().num_waiting == 2
    while engine.stats().num_running or len(engine._scheduler.waiting):
        assert {output.request_id for output in engine.step()} <= {"free"}
    assert grammars.waits == [], "there was something to do"
    assert engine.has_work()
    assert engine.step() == []
    assert grammars.waits == [[grammars.futures[one_of(*TEXTS)]]]
    grammars.finish(one_of(*TEXTS))
    assert run_to_idle(engine)["held", 0] == expected_choice(ask("held"), 0, BASE)
    assert not engine.has_work()


def test_a_refused_grammar_ends_only_its_own_request(engine: Engine, grammars: SlowGrammars) -> None:
    engine.add_request(ask("refused", replace(GREEDY, n=2, grammar=one_of("q"))))
    engine.add_request(ask("held"))
    grammars.futures[one_of("q")].set_exception(grammar_refused("no such rule\nwith details"))
    grammars.finish(one_of(*TEXTS))
    answers = run_to_idle(engine)
    for index in range(2):
        refused = answers["refused", index]
        assert (refused.finish_reason, refused.error) == (FinishReason.ERROR, "no such rule")
        assert refused.error_code is EngineErrorCode.GRAMMAR
    assert answers["held", 0] == expected_choice(ask("held"), 0, BASE)
    engine.check_invariants()


@pytest.mark.parametrize("index", [None, 0, 1])
def test_a_request_can_be_aborted_while_its_grammar_is_compiled(
    engine: Engine, grammars: SlowGrammars, index: int | None
) -> None:
    engine.add_request(ask("held", replace(GREEDY, n=2)))
    aborted = engine.abort("held", index)
    assert [output.index for output in aborted] == ([0, 1] if index is None else [index])
    grammars.finish(one_of(*TEXTS))
    answers = run_to_idle(engine)
    assert sorted(answers) == ([] if index is None else [("held", 1 - index)])
    assert engine._states == {}
    engine.check_invariants()


def test_a_grammar_is_not_compiled_if_all_its_requests_are_aborted(engine: Engine, grammars: SlowGrammars) -> None:
    for request_id in ("first", "second"):
        engine.add_request(ask(request_id))
    (compiled,) = grammars.futures.values()
    engine.abort("first")
    assert not compiled.cancelled()
    engine.abort("second")
    assert compiled.cancelled()


def test_a_grammar_that_becomes_too_costly_ends_only_its_own_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraserve.engine.grammars.compiler.MAX_LEXER_STATES", 40)
    engine._grammars = make_hash_grammars()
    costly = Grammar(GrammarKind.REGEX, "([ab]{0,50}c){20}")
    engine._grammars.compile(costly).result()
    engine._grammars.compile(one_of(*TEXTS)).result()
    engine.add_request(ask("costly", SamplingParams(max_tokens=40, temperature=0.0, grammar=costly)))
    engine.add_request(ask("held"))
    answers = run_to_idle(engine)
    assert answers["costly", 0].finish_reason is FinishReason.ERROR
    assert answers["costly", 0].error_code is EngineErrorCode.GRAMMAR
    error = answers["costly", 0].error or ""
    assert "too many states" in error
    assert "\n" not in error, "the parser's state is not for clients"
    assert answers["held", 0] == expected_choice(ask("held"), 0, BASE)
    engine.check_invariants()


def test_a_json_schema_constrains_the_output(engine: Engine) -> None:
    schema = {"enum": ["abc", 12, 30], "x-guidance": {"whitespace_flexible": False}}
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    hash_grammars().compile(grammar).result()
    engine.add_request(ask("schema", SamplingParams(max_tokens=9, temperature=0.0, grammar=grammar)))
    (answer,) = run_to_idle(engine).values()
    assert json.loads(text_of(answer.token_ids)) in (12, 30), "there are no quotes among the tokens"
