"""Saved recurrent states and copies of them: answers equal those of an engine that computes every prompt as a whole."""

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

from loraserve.engine.engine import Engine
from loraserve.engine.request import EngineRequest, SamplingParams
from loraserve.engine.scheduling.sequence_states import UNCERTAIN_TOKENS
from tests.support.engines import Answer, Answers, collect, greedy, make_engine, run
from tests.support.peft_oracle import LOGIT_TOLERANCE, VOCAB_SIZE
from tests.support.tiny_models import RECURRENT, save_tiny_model

ModelOf = Callable[[str], Path]
FAMILIES = sorted(RECURRENT)
RNG = random.Random(4)
TOKENS = [RNG.randrange(256) for _ in range(256)]
NUM_TOKENS = 20


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> ModelOf:
    def save(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        save_tiny_model(family, folder)
        return folder

    return cache(save)


def asked(engine: Engine, prompt: Sequence[int], num_tokens: int = NUM_TOKENS) -> Answer:
    return run(engine, [greedy("r", prompt, num_tokens, logprobs=VOCAB_SIZE)])["r", 0]


def logprobs(answer: Answer) -> torch.Tensor:
    """[number of tokens, VOCAB_SIZE]"""
    return torch.tensor([[value for _, value in sorted(entry.top)] for entry in answer.logprobs])


def assert_equal(found: Answer, expected: Answer) -> None:
    """The same tokens from the same logits."""
    assert found.error is None
    assert found.token_ids == expected.token_ids
    assert (logprobs(found) - logprobs(expected)).abs().max() <= LOGIT_TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("step_rows", [1024, 33])
def test_a_second_turn_continues_after_the_first_ones_answer(model_of: ModelOf, family: str, step_rows: int) -> None:
    engine, plain = (
        make_engine(model_of(family), max_num_batched_tokens=step_rows, enable_prefix_caching=is_cached)
        for is_cached in (True, False)
    )
    prompt = TOKENS[:70]
    first = asked(engine, prompt, 30)
    assert_equal(first, asked(plain, prompt, 30))
    longer = [*prompt, *first.token_ids, *TOKENS[70:110]]
    second = asked(engine, longer)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 96)
    assert_equal(second, asked(plain, longer))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_turn_with_other_tokens_where_the_prompt_ended_continues_before_them(
    model_of: ModelOf, family: str
) -> None:
    engine, plain = make_engine(model_of(family)), make_engine(model_of(family), enable_prefix_caching=False)
    asked(engine, TOKENS[:68], 30)
    longer = [*TOKENS[: 69 - UNCERTAIN_TOKENS], *TOKENS[100:150]]
    second = asked(engine, longer)
    assert second.num_cached_tokens == 48
    assert_equal(second, asked(plain, longer))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("num_shared", "hits"), [(69, [0, 0, 64]), (63, [0, 0, 0])])
def test_the_third_prompt_with_a_long_shared_beginning_is_a_hit(
    model_of: ModelOf, family: str, num_shared: int, hits: list[int]
) -> None:
    engine, plain = make_engine(model_of(family)), make_engine(model_of(family), enable_prefix_caching=False)
    prompts = [[*TOKENS[:num_shared], *TOKENS[start : start + 50]] for start in (100, 150, 200)]
    answers = [asked(engine, prompt) for prompt in prompts]
    assert [answer.num_cached_tokens for answer in answers] == hits
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_equal(answer, asked(plain, prompt))


def with_choices(request_id: str, n: int, seed: int) -> EngineRequest:
    params = SamplingParams(max_tokens=40, n=n, seed=seed, ignore_eos=True, logprobs=VOCAB_SIZE)
    return EngineRequest(request_id, TOKENS[:60], params)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("aborted", [None, 0, 1])
def test_choices_equal_separate_requests(model_of: ModelOf, family: str, aborted: int | None) -> None:
    """Also if one of them, which may be the first, is aborted while the prompt is computed for all."""
    model = model_of(family)
    engine = make_engine(model, max_num_batched_tokens=32)
    engine.add_request(with_choices("r", 3, 50))
    answers: Answers = {}
    collect(answers, engine.step())
    assert not answers
    if aborted is not None:
        collect(answers, engine.abort("r", aborted))
    while engine.has_work():
        collect(answers, engine.step())
    assert len({tuple(answer.token_ids) for answer in answers.values()}) == 3
    plain = make_engine(model, enable_prefix_caching=False)
    for index in {0, 1, 2} - {aborted}:
        assert_equal(answers["r", index], run(plain, [with_choices("alone", 1, 50 + index)])["alone", 0])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("aborted", [None, 0])
def test_a_choices_turn_continues_after_it(model_of: ModelOf, family: str, aborted: int | None) -> None:
    """Each choice saves its own state, and that of the prompt is saved whichever choice is left."""
    model = model_of(family)
    engine, plain = make_engine(model, max_num_batched_tokens=32), make_engine(model, enable_prefix_caching=False)
    engine.add_request(with_choices("r", 2, 50))
    answers: Answers = {}
    collect(answers, engine.step())
    if aborted is not None:
        collect(answers, engine.abort("r", aborted))
    answers |= run(engine)
    longer = [*TOKENS[:60], *answers["r", 1].token_ids, *TOKENS[100:120]]
    for prompt, num_cached in ((longer, 96), ([*TOKENS[:50], *TOKENS[90:99]], 48)):
        found = asked(engine, prompt)
        assert found.num_cached_tokens == num_cached
        assert_equal(found, asked(plain, prompt))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_new_sequence_does_not_read_what_its_slot_held(model_of: ModelOf, family: str, backend: str) -> None:
    """It may be what is left of a sequence that was not finite."""
    engine, plain = make_engine(model_of(family), backend=backend), make_engine(model_of(family), backend=backend)
    for states in engine._runner._states:
        states.fill_(torch.nan)
    assert_equal(asked(engine, TOKENS[:40]), asked(plain, TOKENS[:40]))
