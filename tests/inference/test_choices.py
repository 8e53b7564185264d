"""Several choices, seeds, logprobs and stops on a tiny model: scheduling does not change them."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from loraserve.engine.request import EngineRequest, FinishReason, SamplingParams
from tests.support.engines import Answers, greedy, make_engine, run
from tests.support.tiny_models import EOS_TOKEN_ID, save_tiny_model, tiny_model

VOCAB_SIZE = 259
BLOCK_BYTES = 2 * 3 * 2 * 16 * 16 * 4  # K and V, 3 layers, 2 heads of 16, 16 tokens, float32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_tiny_model("llama", folder)
    return folder


def sampled_requests() -> list[EngineRequest]:
    """Seeded requests with every kind of filter and penalty, several choices each."""
    rng = random.Random(3)
    variants = [
        {},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.05, "temperature": 1.5},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
        {"logit_bias": {7: 3.0}, "min_tokens": 10},
    ]
    return [
        EngineRequest(
            f"request-{i}",
            [rng.randrange(256) for _ in range(10 + 7 * i)],
            SamplingParams(**{"max_tokens": 20, "n": 1 + i % 3, "seed": 100 * i, "logprobs": 2} | variant),
        )
        for i, variant in enumerate(variants)
    ]


def summary(answers: Answers) -> dict[tuple[str, int], tuple[list[int], FinishReason | None]]:
    return {key: (answer.token_ids, answer.finish_reason) for key, answer in answers.items()}


def test_seeded_samples_do_not_depend_on_preemption_chunking_or_batch_mates(model: Path) -> None:
    requests = sampled_requests()
    expected = summary(run(make_engine(model), requests))
    assert len({tuple(tokens) for tokens, _ in expected.values()}) == len(expected)
    tight = make_engine(model, kv_cache_memory_bytes=9 * BLOCK_BYTES, max_model_len=80, enable_prefix_caching=False)
    assert summary(run(tight, requests)) == expected
    assert tight.stats().num_preemptions > 0
    assert summary(run(make_engine(model, max_num_batched_tokens=40), requests)) == expected
    alone: Answers = {}
    for request in requests:
        alone |= run(make_engine(model), [request])
    assert summary(alone) == expected


def test_choices_equal_single_requests_with_the_following_seeds(model: Path) -> None:
    together = run(make_engine(model), [EngineRequest("r", list(range(21)), SamplingParams(15, n=4, seed=50))])
    for index in range(4):
        single = EngineRequest("r", list(range(21)), SamplingParams(15, seed=50 + index))
        assert run(make_engine(model), [single])["r", 0].token_ids == together["r", index].token_ids


def test_choices_share_the_prompts_blocks(model: Path) -> None:
    engine = make_engine(model)
    engine.add_request(EngineRequest("r", list(range(100)), SamplingParams(30, n=4, ignore_eos=True)))
    engine.step()
    engine.step()
    stats = engine.stats()
    assert stats.num_running == 4
    # 6 full blocks shared, and one copy each of the partly filled seventh (the last writer keeps the original).
    assert stats.num_blocks - stats.num_free_blocks - stats.num_cached_blocks == 6 + 4


@pytest.mark.parametrize("budget", [1024, 17])
def test_prompt_logprobs_equal_the_models_and_bypass_prefix_hits(model: Path, budget: int) -> None:
    prompt = [random.Random(1).randrange(256) for _ in range(60)]
    engine = make_engine(model, max_num_batched_tokens=budget)
    run(engine, [greedy("warm", prompt, 2)])
    answer = run(engine, [greedy("asked", prompt, 2, prompt_logprobs=3)])["asked", 0]
    logits = tiny_model("llama")(torch.tensor([prompt])).logits[0, :, :VOCAB_SIZE]
    expected = torch.log_softmax(logits, -1)
    found = answer.prompt_logprobs
    assert answer.num_cached_tokens == 0
    assert found is not None
    assert found[0] is None
    assert len(found) == len(prompt)
    for position, (token_id, logprob) in enumerate(zip(prompt[1:], found[1:], strict=True)):
        assert logprob is not None
        assert logprob.token_id == token_id
        assert logprob.logprob == pytest.approx(float(expected[position, token_id]), abs=1e-4)
        top = expected[position].topk(3)
        assert [i for i, _ in logprob.top] == top.indices.tolist()
        assert logprob.rank == 1 + int((expected[position] > expected[position, token_id]).sum())


def test_generation_stops_at_eos_and_stop_tokens_but_not_before_min_tokens(model: Path) -> None:
    free = run(make_engine(model), [greedy("r", range(30), 30)])["r", 0].token_ids
    stop = free[9]
    first = free.index(stop)
    base = greedy("r", range(30), 30)
    stopped = replace(base, sampling=replace(base.sampling, stop_token_ids=(stop,)))
    answer = run(make_engine(model), [stopped])["r", 0]
    assert answer.token_ids == free[: first + 1]
    assert (answer.finish_reason, answer.stop_token_id) == (FinishReason.STOP, stop)
    late = replace(base, sampling=replace(stopped.sampling, min_tokens=25))
    assert len(run(make_engine(model), [late])["r", 0].token_ids) >= 25
    biased = replace(base, sampling=SamplingParams(30, temperature=0.0, logit_bias={EOS_TOKEN_ID: 100.0}))
    ended = run(make_engine(model), [biased])["r", 0]
    assert (ended.token_ids, ended.finish_reason, ended.stop_token_id) == ([EOS_TOKEN_ID], FinishReason.STOP, None)


def test_ids_beyond_the_tokenizers_vocabulary_are_never_sampled(model: Path) -> None:
    requests = [
        EngineRequest(f"r{i}", [i], SamplingParams(40, temperature=2.0, seed=i, ignore_eos=True)) for i in range(20)
    ]
    answers = run(make_engine(model), requests)
    assert max(max(answer.token_ids) for answer in answers.values()) < VOCAB_SIZE


def test_generation_finishes_with_length_at_max_model_len(model: Path) -> None:
    engine = make_engine(model, max_model_len=40)
    answer = run(engine, [greedy("r", range(30), 100)])["r", 0]
    assert (len(answer.token_ids), answer.finish_reason) == (10, FinishReason.LENGTH)
