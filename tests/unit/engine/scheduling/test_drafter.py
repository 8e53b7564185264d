"""Speculative decoding on the hash model, whose answers are known."""

from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from loraserve_kernels.decoder_model import ModelOutput
from loraserve_kernels.step_batch import StepBatch

from loraserve.engine.engine import Engine
from loraserve.engine.request import EngineRequest, FinishReason, ReasoningLimit, ReasoningTokens, SamplingParams
from loraserve.engine.scheduling.drafter import TRUSTED_ROWS, FreeRows
from tests.support.hash_grammars import behind, one_of
from tests.support.hash_model import BASE, Choice, HashRunner, expected_choice, make_hash_engine, run_to_idle


@dataclass
class FakeDraft:
    next: Callable[[list[int], int, int], tuple[list[int], bool]]

    def note_computed(self, draft: list[int], num_tokens: int) -> None: ...


FREE_ROWS = 8
"""Free rows of the hash engine."""
MAX_LENGTH = 5


def ask(name: str = "r", prompt: list[int] | None = None, **params: object) -> EngineRequest:
    sampling = SamplingParams(**{"max_tokens": 12, "temperature": 0.0, "ignore_eos": True} | params)
    return EngineRequest(name, prompt or [1, 2, 3, 4, 5], sampling)


def answer(request: EngineRequest, index: int = 0) -> Choice:
    return expected_choice(request, index, BASE)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Engine, HashRunner]]:
    """An engine that drafts the answers of the `known` requests; the first `right` tokens of a draft are correct."""

    def make(known: list[EngineRequest], right: int = 99, **overrides: object) -> tuple[Engine, HashRunner]:
        answers = [
            request.prompt_token_ids + answer(request, index).token_ids
            for request in known
            for index in range(request.sampling.n)
        ]

        def draft(token_ids: list[int], max_length: int, _max_trusted_length: int) -> tuple[list[int], bool]:
            for tokens in answers:
                if tokens[: len(token_ids)] == token_ids:
                    rest = tokens[len(token_ids) :]
                    wrong = [1 + token % 20 for token in rest[right:]]
                    return [*rest[:right], *wrong][: max(min(max_length, MAX_LENGTH), 0)], True
            return [], False

        monkeypatch.setattr("loraserve.engine.scheduling.drafter.Draft", lambda *_: FakeDraft(draft))
        settings: dict[str, object] = {
            "num_speculative_tokens": MAX_LENGTH,
            "num_blocks": 40,
            "max_num_batched_tokens": 32,
        }
        return make_hash_engine(monkeypatch, **settings | overrides)

    return make


def test_a_step_outputs_several_tokens_and_they_are_the_same_as_without_drafts(
    make: Callable[..., tuple[Engine, HashRunner]],
) -> None:
    request = ask()
    engine, _ = make([request])
    engine.add_request(request)
    assert run_to_idle(engine) == {("r", 0): answer(request)}
    stats = engine.stats()
    assert stats.step == 1 + 2, "a prompt, a step of one and five tokens, and one of the last five"
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (9, 9)
    assert stats.num_generation_tokens == 12


@pytest.mark.parametrize("right", [0, 1, 2])
def test_wrong_drafts_do_not_change_the_output(make: Callable[..., tuple[Engine, HashRunner]], right: int) -> None:
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
def test_each_drafted_token_is_judged_as_if_the_ones_before_it_were_output(
    make: Callable[..., tuple[Engine, HashRunner]], params: dict[str, object]
) -> None:
    request = ask(**params)
    engine, _ = make([request], 3)
    engine.add_request(request)
    assert run_to_idle(engine) == {("r", 0): answer(request)}
    assert engine.stats().num_accepted_tokens > 0


def test_a_grammar_constrains_drafted_tokens_too(make: Callable[..., tuple[Engine, HashRunner]]) -> None:
    texts = ["".join(pair) for pair in product(("ab", "ac", "bd"), ("ef", "gh", "eg"), ("ijk", "ilm"))]
    request = ask(grammar=one_of(*texts), temperature=1.0, seed=1, logprobs=0)  # no forced tokens with logprobs
    for right in (99, 2):
        engine, _ = make([request], right)
        engine.add_request(request)
        assert run_grammars_to_idle(engine) == {("r", 0): answer(request)}
        assert engine.stats().num_accepted_tokens > 0


@pytest.mark.parametrize("right", [99, 3, 1])
def test_tokens_that_a_grammar_forces_may_also_be_drafted(
    make: Callable[..., tuple[Engine, HashRunner]], right: int
) -> None:
    texts = ["".join(pair) for pair in product(("ab", "ac"), ("def0", "gfh1"), ("ijk", "ilm"))]
    requests = [ask(f"r{seed}", grammar=one_of(*texts), temperature=1.0, seed=seed) for seed in range(5)]
    for request in requests:
        engine, _ = make(requests, right)
        engine.add_request(request)
        assert run_grammars_to_idle(engine) == {(request.request_id, 0): answer(request)}


@pytest.mark.parametrize("reasoning", [ReasoningTokens(None, 3), ReasoningTokens(1, 3)])
@pytest.mark.parametrize("logprobs", [None, 0])
@pytest.mark.parametrize("right", [99, 3, 1])
def test_reasoning_and_the_grammar_constrained_output_after_it_can_be_drafted(
    make: Callable[..., tuple[Engine, HashRunner]], right: int, logprobs: int | None, reasoning: ReasoningTokens
) -> None:
    texts = ["".join(pair) for pair in product(("ab", "ac"), ("def0", "gfh1"), ("ijk", "ilm"))]
    params: dict[str, object] = {"grammar": behind(reasoning, one_of(*texts)), "temperature": 1.0, "logprobs": logprobs}
    requests = [ask(f"r{seed}", max_tokens=30, seed=seed, logit_bias={1: 9.0, 3: 2.0}, **params) for seed in range(5)]
    assert any(answer(request).finish_reason is FinishReason.STOP for request in requests)
    for request in requests:
        engine, _ = make(requests, right)
        engine.add_request(request)
        assert run_grammars_to_idle(engine) == {(request.request_id, 0): answer(request)}
        assert engine.stats().num_accepted_tokens > 0


@pytest.mark.parametrize("tokens", [ReasoningTokens(None, 3), ReasoningTokens(1, 3)])
@pytest.mark.parametrize("logprobs", [None, 0])
@pytest.mark.parametrize("has_grammar", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 4, 7])
def test_drafts_do_not_carry_reasoning_beyond_its_limit(
    make: Callable[..., tuple[Engine, HashRunner]],
    tokens: ReasoningTokens,
    logprobs: int | None,
    has_grammar: bool,
    max_tokens: int,
) -> None:
    texts = ["".join(pair) for pair in product(("ab", "ac"), ("def0", "gfk1"), ("ijk", "ilm"))]
    requests = [
        ask(
            f"r{seed}",
            max_tokens=30,
            seed=seed,
            temperature=1.0,
            logit_bias={1: 9.0, 3: -2.0},
            logprobs=logprobs,
            grammar=behind(tokens, one_of(*texts)) if has_grammar else None,
            reasoning_limit=ReasoningLimit(tokens, max_tokens),
        )
        for seed in range(4)
    ]
    num_accepted = 0
    for request in requests:
        engine, _ = make(requests)
        engine.add_request(request)
        assert run_grammars_to_idle(engine) == {(request.request_id, 0): answer(request)}
        num_accepted += engine.stats().num_accepted_tokens
    assert num_accepted > 0


def run_grammars_to_idle(engine: Engine) -> dict[tuple[str, int], Choice]:
    """Compile the grammars first, because steps that wait for one do nothing."""
    wait(engine._compiling.values())
    return run_to_idle(engine)


def test_outputs_report_how_many_tokens_were_predicted_and_accepted(
    make: Callable[..., tuple[Engine, HashRunner]],
) -> None:
    request = ask(logprobs=1)
    engine, _ = make([request], 2)
    engine.add_request(request)
    engine.step()
    (output,) = engine.step()
    assert output.token_ids == answer(request).token_ids[1:4]
    assert output.logprobs is not None
    assert len(output.logprobs) == 3
    assert (output.num_predicted_tokens, output.num_accepted_tokens) == (5, 2)
    (output,) = engine.step()
    assert (output.num_predicted_tokens, output.num_accepted_tokens) == (10, 4)


def test_a_stop_token_within_a_draft_ends_the_output(make: Callable[..., tuple[Engine, HashRunner]]) -> None:
    probe = answer(ask())
    request = ask(stop_token_ids=(probe.token_ids[3],))
    engine, _ = make([ask()])
    engine.add_request(request)
    (choice,) = run_to_idle(engine).values()
    assert choice == answer(request)
    assert choice.finish_reason is FinishReason.STOP
    assert len(choice.token_ids) <= 4


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_drafts_do_not_exceed_the_remaining_max_tokens(
    make: Callable[..., tuple[Engine, HashRunner]], max_tokens: int
) -> None:
    request = ask(max_tokens=max_tokens)
    engine, _ = make([ask()])
    engine.add_request(request)
    assert run_to_idle(engine) == {("r", 0): answer(request)}
    assert engine.stats().num_draft_tokens == max(max_tokens - 2, 0)


def test_output_with_drafts_does_not_exceed_the_models_maximum_length(
    make: Callable[..., tuple[Engine, HashRunner]],
) -> None:
    request = ask(prompt=list(range(1, 7)) * 7, max_tokens=40)
    engine, _ = make([request])
    engine.add_request(request)
    (choice,) = run_to_idle(engine).values()
    assert choice == answer(request)
    assert len(choice.token_ids) == 48 - 42


def test_free_rows_that_one_sequence_does_not_use_go_to_the_next(
    make: Callable[..., tuple[Engine, HashRunner]],
) -> None:
    known, unknown = ask("known", [4, 2, 3]), ask("unknown", [5, 2, 3])
    engine, runner = make([known])
    engine.add_request(unknown)
    engine.add_request(known)
    engine.step()
    engine.step()
    assert sorted(item.num_rows for item in runner.scheduled) == [1, 4]
    engine.step()
    assert sorted(item.num_rows for item in runner.scheduled) == [1, 6], "it is first in every other step"


@pytest.fixture
def dealt(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(First token, length, trusted length) of each requested draft; all drafts are empty."""
    lengths: list[tuple[int, int, int]] = []

    def draft(token_ids: list[int], max_length: int, max_trusted_length: int) -> tuple[list[int], bool]:
        lengths.append((token_ids[0], max_length, max_trusted_length))
        return [], False

    monkeypatch.setattr("loraserve.engine.scheduling.drafter.Draft", lambda *_: FakeDraft(draft))
    return lengths


def start_decoding(
    monkeypatch: pytest.MonkeyPatch, tenants: list[str], prompt_tokens: int = 3, **overrides: object
) -> Engine:
    """Add one request per entry of `tenants`, whose first token is its index, and compute the prompts."""
    settings: dict[str, object] = {"num_speculative_tokens": 8, "num_blocks": 60, "max_num_batched_tokens": 64}
    engine, _ = make_hash_engine(monkeypatch, max_num_seqs=16, **settings | overrides)
    for number, tenant in enumerate(tenants):
        request = ask(f"r{number}", [number, *[2] * (prompt_tokens - 1)], max_tokens=20)
        engine.add_request(replace(request, tenant=tenant))
    engine.step()
    return engine


def test_free_rows_are_dealt_in_turn_and_as_many_again_after_correct_drafts(
    monkeypatch: pytest.MonkeyPatch, dealt: list[tuple[int, int, int]]
) -> None:
    engine = start_decoding(monkeypatch, ["t"] * 3)
    for _ in range(3):
        engine.step()
    assert [first for first, *_ in dealt] == [1, 2, 0, 2, 0, 1, 0, 1, 2]
    assert [lengths for _, *lengths in dealt[:3]] == [[2, 5], [3, 7], [5, 13]]


def test_with_several_tenants_only_free_rows_are_dealt(
    monkeypatch: pytest.MonkeyPatch, dealt: list[tuple[int, int, int]]
) -> None:
    start_decoding(monkeypatch, ["red", "blue"]).step()
    assert [lengths for _, *lengths in dealt] == [[3, 3], [6, 6]]
    dealt.clear()
    start_decoding(monkeypatch, [*["red"] * 7, *["blue"] * 2]).step()
    assert all(lengths == [0, 0] for _, *lengths in dealt)


def test_one_sequence_in_turn_may_draft_even_without_free_rows(
    monkeypatch: pytest.MonkeyPatch, dealt: list[tuple[int, int, int]]
) -> None:
    """Otherwise no draft could ever become correct."""
    start_decoding(monkeypatch, ["t"] * (FREE_ROWS + 2)).step()
    assert [length for _, length, _ in dealt] == [1, *[0] * (FREE_ROWS + 1)]
    assert [trusted for _, _, trusted in dealt][:3] == [1, 1, 1]


def test_a_row_with_a_long_context_counts_as_several_rows(
    monkeypatch: pytest.MonkeyPatch, dealt: list[tuple[int, int, int]]
) -> None:
    engine = start_decoding(monkeypatch, ["t"], prompt_tokens=29)
    assert engine._drafter is not None
    engine._drafter._free_rows = FreeRows(FREE_ROWS, context_of_a_row=15)
    engine.step()
    assert dealt == [(0, 3, 5)], "7 and 15 rows, each as long as three"


def test_drafts_do_not_exceed_max_num_batched_tokens(
    monkeypatch: pytest.MonkeyPatch, dealt: list[tuple[int, int, int]]
) -> None:
    start_decoding(monkeypatch, ["t"], max_num_batched_tokens=4).step()
    assert dealt == [(0, 3, 3)]
    dealt.clear()
    engine = start_decoding(monkeypatch, ["t"] * 2, max_num_batched_tokens=2)
    for _ in range(12):
        engine.step()
    assert dealt == []


def test_nothing_is_drafted_in_large_steps_or_beside_prompts(
    make: Callable[..., tuple[Engine, HashRunner]],
) -> None:
    requests = [ask(f"r{i}", [1 + i, 2], max_tokens=3) for i in range(TRUSTED_ROWS * FREE_ROWS)]
    engine, _ = make(requests, max_num_seqs=len(requests))
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


def test_drafts_take_no_blocks_from_other_sequences(make: Callable[..., tuple[Engine, HashRunner]]) -> None:
    """If blocks are scarce, a sequence continues without a draft, and none is preempted."""
    requests = [ask("a", [1, 2, 3]), ask("b", [4, 5, 6])]
    engine, _ = make(requests, num_blocks=8, max_num_batched_tokens=16)
    for request in requests:
        engine.add_request(request)
    choices = run_to_idle(engine)
    assert choices == {(request.request_id, 0): answer(request) for request in requests}
    assert engine.stats().num_preemptions == 0


def test_no_prefix_with_wrongly_drafted_tokens_is_found(make: Callable[..., tuple[Engine, HashRunner]]) -> None:
    """Blocks with wrong rows become findable only after those are overwritten."""
    request = ask()
    engine, _ = make([request], 1)
    engine.add_request(request)
    (first,) = run_to_idle(engine).values()
    again = ask("again", request.prompt_token_ids + first.token_ids, max_tokens=4)
    engine.add_request(again)
    assert run_to_idle(engine)["again", 0] == answer(again)
    assert engine.stats().prefix_cache_hits >= 12


def test_each_choice_has_its_own_drafts(make: Callable[..., tuple[Engine, HashRunner]]) -> None:
    request = ask(n=3, temperature=1.0, seed=2)
    engine, _ = make([request], 2)
    engine.add_request(request)
    assert run_to_idle(engine) == {("r", index): answer(request, index) for index in range(3)}
    assert engine.stats().num_accepted_tokens > 0


def test_drafts_do_not_change_what_tenants_are_charged(make: Callable[..., tuple[Engine, HashRunner]]) -> None:
    charged = []
    for length in (0, MAX_LENGTH):
        request = ask(max_tokens=9)
        engine, _ = make([request], 3, num_speculative_tokens=length)
        charges: list[float] = []
        engine._scheduler.waiting.charge = lambda _tenant, tokens, charges=charges: charges.append(tokens)
        engine.add_request(request)
        run_to_idle(engine)
        charged.append(sum(charges))
    assert charged == [5 + 9 - 1] * 2


def test_a_correctly_drafted_last_token_counts_as_accepted(make: Callable[..., tuple[Engine, HashRunner]]) -> None:
    request = ask(max_tokens=40, stop_token_ids=(answer(ask()).token_ids[4],))
    tokens = answer(request).token_ids
    engine, _ = make([request])
    engine.add_request(request)
    outputs = [output for _ in range(3) if engine.has_work() for output in engine.step()]
    assert sum(len(output.token_ids) for output in outputs) == len(tokens)
    assert outputs[-1].num_accepted_tokens == len(tokens) - 1 - (len(outputs) - 2)


def test_non_finite_values_matter_only_if_the_draft_is_correct(
    make: Callable[..., tuple[Engine, HashRunner]],
) -> None:
    """Then the request fails with its output so far. The rows of a wrong draft belong to no request."""
    request = ask()
    for right, num_tokens in ((99, 1 + 2), (1, 12)):
        engine, runner = make([request], right)
        forward = runner.forward

        def forward_with_nan(batch: StepBatch, *args: object, forward=forward, runner=runner) -> ModelOutput:
            output = forward(batch, *args)
            if runner.num_forwards == 2:
                output.logits[2] = torch.nan
                return ModelOutput(output.logits)
            return output

        runner.forward = forward_with_nan
        engine.add_request(request)
        (choice,) = run_to_idle(engine).values()
        assert choice.token_ids == answer(request).token_ids[:num_tokens]
        assert (choice.error is not None) == (right == 99)


def test_drafting_can_be_turned_off(make: Callable[..., tuple[Engine, HashRunner]]) -> None:
    request = ask()
    engine, _ = make([request], num_speculative_tokens=0)
    engine.add_request(request)
    assert run_to_idle(engine) == {("r", 0): answer(request)}
    assert engine.stats().num_draft_tokens == 0
