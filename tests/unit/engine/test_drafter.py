"""Speculative decoding on the hash model, whose answers are known."""

from collections.abc import Callable
from concurrent.futures import wait
from itertools import product
from types import SimpleNamespace

import pytest

from loraserve.engine.engine import Engine
from loraserve.engine.request import EngineRequest, FinishReason, SamplingParams
from tests.support.hash_grammars import one_of
from tests.support.hash_model import BASE, Choice, HashRunner, expected_choice, make_hash_engine, run_to_idle

FREE_ROWS = 8
"""Of the hash engine."""
MAX_LENGTH = 5


def ask(name: str = "r", prompt: list[int] | None = None, **params: object) -> EngineRequest:
    sampling = SamplingParams(**{"max_tokens": 12, "temperature": 0.0, "ignore_eos": True} | params)  # type: ignore[arg-type]
    return EngineRequest(name, prompt or [1, 2, 3, 4, 5], sampling)


def answer(request: EngineRequest, index: int = 0) -> Choice:
    return expected_choice(request, index, BASE)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Engine, HashRunner]]:
    """An engine whose drafts are right as far as `right` says, of those that `known` requests will say."""

    def make(known: list[EngineRequest], right: int = 99, **overrides: object) -> tuple[Engine, HashRunner]:
        answers = [
            request.prompt_token_ids + answer(request, index).token_ids
            for request in known
            for index in range(request.sampling.n)
        ]

        def draft(token_ids: list[int], max_length: int, _max_trusted_length: int) -> list[int]:
            for tokens in answers:
                if tokens[: len(token_ids)] == token_ids:
                    rest = tokens[len(token_ids) :]
                    wrong = [1 + token % 20 for token in rest[right:]]
                    return [*rest[:right], *wrong][: min(max_length, MAX_LENGTH)]
            return []

        monkeypatch.setattr("loraserve.engine.drafter.Draft", lambda *_: SimpleNamespace(next=draft))
        settings: dict[str, object] = {
            "num_speculative_tokens": MAX_LENGTH,
            "num_blocks": 40,
            "max_num_batched_tokens": 32,
        }
        return make_hash_engine(monkeypatch, **settings | overrides)

    return make


def test_tokens_come_several_in_a_step_and_are_the_same(make: Callable[..., tuple[Engine, HashRunner]]) -> None:
    request = ask()
    engine, _ = make([request])
    engine.add_request(request)
    assert run_to_idle(engine) == {("r", 0): answer(request)}
    stats = engine.stats()
    assert stats.step == 1 + 2, "a prompt, a step of one and five tokens, and one of the last five"
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (9, 9)
    assert stats.num_generation_tokens == 12


@pytest.mark.parametrize("right", [0, 1, 2])
def test_what_is_drafted_wrongly_changes_nothing(make: Callable[..., tuple[Engine, HashRunner]], right: int) -> None:
    requests = [ask("greedy"), ask("drawn", [9, 8, 7], temperature=1.0, seed=4, logprobs=2)]
    engine, _ = make(requests, right)
    for request in requests:
        engine.add_request(request)
    assert run_to_idle(engine) == {(request.request_id, 0): answer(request) for request in requests}
    stats = engine.stats()
    assert stats.num_draft_tokens > stats.num_accepted_tokens
    assert (stats.num_accepted_tokens > 0) == (right > 0)


PENALTIES = [
    {"repetition_penalty": 1.5},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "temperature": 1.0, "seed": 3},
    {"logit_bias": {4: 5.0, 6: -5.0}},
    {"allowed_token_ids": (2, 3, 4, 5, 6, 8, 9)},
    {"min_tokens": 8, "ignore_eos": False, "stop_token_ids": (3, 4, 5, 6)},
]


@pytest.mark.parametrize("params", PENALTIES)
def test_each_drafted_token_is_judged_as_if_those_before_it_were_said(
    make: Callable[..., tuple[Engine, HashRunner]], params: dict[str, object]
) -> None:
    request = ask(**params)
    engine, _ = make([request], 3)
    engine.add_request(request)
    assert run_to_idle(engine) == {("r", 0): answer(request)}
    assert engine.stats().num_accepted_tokens > 0


def test_a_grammar_holds_drafted_tokens_too(make: Callable[..., tuple[Engine, HashRunner]]) -> None:
    texts = ["".join(pair) for pair in product(("ab", "ac", "bd"), ("ef", "gh", "eg"), ("ijk", "ilm"))]
    request = ask(grammar=one_of(*texts), temperature=1.0, seed=1, logprobs=0)  # with them nothing is appended unasked
    for right in (99, 2):
        engine, _ = make([request], right)
        engine.add_request(request)
        assert run_grammars_to_idle(engine) == {("r", 0): answer(request)}
        assert engine.stats().num_accepted_tokens > 0


@pytest.mark.parametrize("right", [99, 3, 1])
def test_tokens_that_a_grammar_appends_may_have_been_drafted(
    make: Callable[..., tuple[Engine, HashRunner]], right: int
) -> None:
    texts = ["".join(pair) for pair in product(("ab", "ac"), ("def0", "gfh1"), ("ijk", "ilm"))]
    requests = [ask(f"r{seed}", grammar=one_of(*texts), temperature=1.0, seed=seed) for seed in range(5)]
    for request in requests:
        engine, _ = make(requests, right)
        engine.add_request(request)
        assert run_grammars_to_idle(engine) == {(request.request_id, 0): answer(request)}


def run_grammars_to_idle(engine: Engine) -> dict[tuple[str, int], Choice]:
    """Compiled first, as steps that wait for it do nothing."""
    wait(engine._compiling.values())
    return run_to_idle(engine)


def test_outputs_say_how_much_was_drafted(make: Callable[..., tuple[Engine, HashRunner]]) -> None:
    request = ask(logprobs=1)
    engine, _ = make([request], 2)
    engine.add_request(request)
    engine.step()
    (output,) = engine.step()
    assert output.token_ids == answer(request).token_ids[1:4]
    assert output.logprobs is not None
    assert len(output.logprobs) == 3
    assert (output.num_draft_tokens, output.num_accepted_tokens) == (5, 2)
    (output,) = engine.step()
    assert (output.num_draft_tokens, output.num_accepted_tokens) == (10, 4)


def test_nothing_follows_the_last_token(make: Callable[..., tuple[Engine, HashRunner]]) -> None:
    """A stop token among the drafted ones ends it there."""
    probe = answer(ask())
    request = ask(stop_token_ids=(probe.token_ids[3],))
    engine, _ = make([ask()])
    engine.add_request(request)
    (choice,) = run_to_idle(engine).values()
    assert choice == answer(request)
    assert choice.finish_reason is FinishReason.STOP
    assert len(choice.token_ids) <= 4


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_no_more_is_drafted_than_is_left_to_say(
    make: Callable[..., tuple[Engine, HashRunner]], max_tokens: int
) -> None:
    request = ask(max_tokens=max_tokens)
    engine, _ = make([ask()])
    engine.add_request(request)
    assert run_to_idle(engine) == {("r", 0): answer(request)}
    assert engine.stats().num_draft_tokens == max(max_tokens - 2, 0)


def test_the_models_length_is_not_exceeded(make: Callable[..., tuple[Engine, HashRunner]]) -> None:
    request = ask(prompt=list(range(1, 7)) * 7, max_tokens=40)
    engine, _ = make([request])
    engine.add_request(request)
    (choice,) = run_to_idle(engine).values()
    assert choice == answer(request)
    assert len(choice.token_ids) == 48 - 42


def test_rows_are_dealt_evenly_up_to_those_that_are_free(make: Callable[..., tuple[Engine, HashRunner]]) -> None:
    requests = [ask(name, [token, 2, 3]) for name, token in (("a", 4), ("b", 5), ("c", 6))]
    engine, runner = make(requests)
    for request in requests:
        engine.add_request(request)
    engine.step()
    engine.step()
    assert sorted(item.num_rows for item in runner.scheduled) == [2, 3, 3]
    assert sum(item.num_rows for item in runner.scheduled) == FREE_ROWS


def test_what_one_leaves_is_given_to_the_next(make: Callable[..., tuple[Engine, HashRunner]]) -> None:
    known, unknown = ask("known", [4, 2, 3]), ask("unknown", [5, 2, 3])
    engine, runner = make([known])
    engine.add_request(unknown)
    engine.add_request(known)
    engine.step()
    engine.step()
    assert [item.num_rows for item in runner.scheduled] == [1, 6]


def test_where_drafts_are_right_steps_may_have_twice_as_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they are is for the draft to say."""
    lengths = []

    def draft(token_ids: list[int], max_length: int, max_trusted_length: int) -> list[int]:
        lengths.append((max_length, max_trusted_length))
        return [9] * max_trusted_length

    monkeypatch.setattr("loraserve.engine.drafter.Draft", lambda *_: SimpleNamespace(next=draft))
    engine, runner = make_hash_engine(
        monkeypatch, num_speculative_tokens=8, num_blocks=40, max_num_batched_tokens=32, max_num_seqs=16
    )
    for i in range(3):
        engine.add_request(ask(f"r{i}", [1 + i, 2, 3], max_tokens=40))
    engine.step()
    engine.step()
    assert lengths == [(2, 5), (0, 4), (0, 4)]
    assert sum(item.num_rows for item in runner.scheduled) == 2 * FREE_ROWS


def test_no_rows_are_added_to_steps_with_many_or_with_prompts(
    make: Callable[..., tuple[Engine, HashRunner]],
) -> None:
    requests = [ask(f"r{i}", [1 + i, 2, 3], max_tokens=3) for i in range(FREE_ROWS)]
    engine, _ = make(requests, max_num_seqs=FREE_ROWS)
    for request in requests:
        engine.add_request(request)
    engine.step()
    engine.step()
    assert engine.stats().num_draft_tokens == 0
    engine, runner = make([requests[0]])
    engine.add_request(requests[0])
    engine.step()
    engine.add_request(ask("new", [9, 8, 7]))
    engine.step()
    assert sorted(item.num_rows for item in runner.scheduled) == [1, 3]


def test_a_draft_takes_no_blocks_from_others(make: Callable[..., tuple[Engine, HashRunner]]) -> None:
    """With too few, it goes on without one; nobody is preempted."""
    requests = [ask("a", [1, 2, 3]), ask("b", [4, 5, 6])]
    engine, _ = make(requests, num_blocks=8, max_num_batched_tokens=16)
    for request in requests:
        engine.add_request(request)
    choices = run_to_idle(engine)
    assert choices == {(request.request_id, 0): answer(request) for request in requests}
    assert engine.stats().num_preemptions == 0


def test_no_prefix_with_wrong_tokens_is_found(make: Callable[..., tuple[Engine, HashRunner]]) -> None:
    """Blocks of the wrong rows are written again, and only then found."""
    request = ask()
    engine, _ = make([request], 1)
    engine.add_request(request)
    (first,) = run_to_idle(engine).values()
    again = ask("again", request.prompt_token_ids + first.token_ids, max_tokens=4)
    engine.add_request(again)
    assert run_to_idle(engine)["again", 0] == answer(again)
    assert engine.stats().prefix_cache_hits >= 12


def test_choices_are_drafted_apart(make: Callable[..., tuple[Engine, HashRunner]]) -> None:
    request = ask(n=3, temperature=1.0, seed=2)
    engine, _ = make([request], 2)
    engine.add_request(request)
    assert run_to_idle(engine) == {("r", index): answer(request, index) for index in range(3)}
    assert engine.stats().num_accepted_tokens > 0


def test_drafting_can_be_turned_off(make: Callable[..., tuple[Engine, HashRunner]]) -> None:
    request = ask()
    engine, _ = make([request], num_speculative_tokens=0)
    engine.add_request(request)
    assert run_to_idle(engine) == {("r", 0): answer(request)}
    assert engine.stats().num_draft_tokens == 0
