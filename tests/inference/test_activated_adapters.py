"""Activated LoRA against PEFT: tokens before the invocation are the base model's, all others the adapter's."""

import random
from functools import cache
from pathlib import Path

import pytest
import torch
from peft import LoraConfig

from loraserve.engine.engine import Engine
from loraserve.engine.errors import EngineRequestError
from loraserve.engine.request import EngineRequest, Pooling
from loraserve.engine.scheduling.sequence_states import UNCERTAIN_TOKENS
from tests.support.engines import Answer, greedy, make_engine, run, to_pool
from tests.support.peft_oracle import (
    LOGIT_TOLERANCE,
    NUM_TOKENS,
    VOCAB_SIZE,
    Oracle,
    OracleOf,
    cached_tokens,
    differs,
    run_all,
    run_one_by_one,
    wrong_answers,
)
from tests.support.tiny_adapters import ALL_LINEAR, reference_answers, save_adapters
from tests.support.tiny_models import RECURRENT, save_tiny_model

LONG, SHORT, ALONE = [250, 251, 252, 253, 254], [250, 251], [249]
"""Invocations; one is a prefix of another."""
PLACES: dict[str, tuple[list[int], int, int]] = {
    "start": (LONG, 0, 20),
    "border": (LONG, 32, 3),
    "in_block": (SHORT, 37, 30),
    "end": (ALONE, 50, 0),
    "late": (LONG, 120, 9),
}
"""Name → (invocation, tokens before it, tokens after it)."""


def _configs() -> dict[str, LoraConfig]:
    targets = {"end": [*ALL_LINEAR, "lm_head"], "late": ["q_proj", "v_proj"]}
    return {
        name: LoraConfig(
            r=4 + 3 * rank,
            lora_alpha=16,
            target_modules=targets.get(name, ALL_LINEAR),
            alora_invocation_tokens=invocation,
            lora_bias=name == "in_block",
            task_type="CAUSAL_LM",
        )
        for rank, (name, (invocation, _, _)) in enumerate(PLACES.items())
    } | {"plain": LoraConfig(r=8, lora_alpha=16, target_modules=ALL_LINEAR)}


def make_oracle(architecture: str, folder: Path) -> Oracle:
    model = save_tiny_model(architecture, folder / "model")
    adapters = save_adapters(model, folder / "adapters", _configs())
    rng = random.Random(5)
    context = [rng.randrange(240) for _ in range(120)]
    prompts: dict[str | None, list[int]] = {None: context[:64], "plain": context[:40]}
    for name, (invocation, num_before, num_behind) in PLACES.items():
        prompts[name] = [*context[:num_before], *invocation, *(rng.randrange(240) for _ in range(num_behind))]
    # The invocation occurs twice; the last one counts.
    prompts["late"][60:65] = LONG
    references = reference_answers(model, adapters, prompts, NUM_TOKENS, VOCAB_SIZE)
    return Oracle(folder, folder / "model", adapters, prompts, references, is_recurrent=architecture in RECURRENT)


@pytest.fixture(scope="module")
def oracle_of(tmp_path_factory: pytest.TempPathFactory) -> OracleOf:
    return cache(lambda architecture: make_oracle(architecture, tmp_path_factory.mktemp(architecture)))


@pytest.fixture(scope="module")
def oracle(oracle_of: OracleOf) -> Oracle:
    return oracle_of("llama")


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_activated_adapters_equal_peft_in_a_mixed_batch(oracle: Oracle, backend: str) -> None:
    _, wrong = run_all(oracle, backend=backend)
    assert not wrong


@pytest.mark.parametrize("num_rows", [7, 33])
def test_activated_adapters_equal_peft_in_chunks(oracle: Oracle, num_rows: int) -> None:
    engine, digests = oracle.engine(max_num_batched_tokens=num_rows)
    assert not wrong_answers(oracle, run_one_by_one(engine, oracle.requests(digests)))


def test_activated_adapters_equal_peft_after_preemption(oracle: Oracle) -> None:
    engine, wrong = run_all(oracle, **oracle.preempting(make_engine(oracle.model)))
    assert not wrong
    assert engine.stats().num_preemptions > 0


def test_oracle_notices_an_adapter_that_is_applied_to_all_tokens(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "_adapter_start", lambda *_: 0)
    _, wrong = run_all(oracle)
    assert set(wrong) == PLACES.keys() - {"start"}


def test_pooled_hidden_states_equal_peft(oracle: Oracle) -> None:
    engine, digests = oracle.engine()
    requests = [
        to_pool(f"{pooling}-{name}", oracle.prompts[name], digests[name], pooling=pooling)
        for pooling in Pooling
        for name in PLACES
    ]
    answers = run(engine, requests)
    for name in PLACES:
        hidden = oracle.references[name].hidden
        for pooling, expected in ((Pooling.LAST, hidden[-1]), (Pooling.MEAN, hidden.mean(dim=0))):
            vector = torch.frombuffer(bytearray(answers[f"{pooling}-{name}", 0].pooled or b""), dtype=torch.float32)
            assert (vector - expected).abs().max() <= LOGIT_TOLERANCE * hidden.abs().max(), (name, pooling)


def test_prompt_logprobs_equal_the_base_models_up_to_the_invocation(oracle: Oracle) -> None:
    engine, digests = oracle.engine(max_num_batched_tokens=50)
    prompt, start = oracle.prompts["in_block"], PLACES["in_block"][1]
    of_base = greedy("base", prompt, 1, prompt_logprobs=VOCAB_SIZE)
    answers = run(engine, [of_base, greedy("activated", prompt, 1, digests["in_block"], prompt_logprobs=VOCAB_SIZE)])
    pairs = list(zip(_prompt_logprobs(answers["base", 0]), _prompt_logprobs(answers["activated", 0]), strict=True))
    differ = [max(abs(base[i] - other[i]) for i in base) > 0.1 for base, other in pairs]
    # Entry i is for token i + 1, from the logits in the row of token i.
    assert differ == [i >= start for i in range(len(prompt) - 1)]


@pytest.mark.parametrize("name", sorted(PLACES))
def test_activated_adapters_hit_the_base_models_blocks_before_the_invocation(oracle: Oracle, name: str) -> None:
    engine, digests = oracle.engine()
    prompt, start = oracle.prompts[name], PLACES[name][1]
    run(engine, [greedy("base", prompt, 1)])
    first, again = (run(engine, [request]) for request in _twice(oracle, digests, name))
    assert first[f"first-{name}", 0].num_cached_tokens == start // 16 * 16
    assert again[f"again-{name}", 0].num_cached_tokens == (len(prompt) - 1) // 16 * 16
    for answers, prefix in ((first, "first-"), (again, "again-")):
        assert differs(oracle.references[name], answers[f"{prefix}{name}", 0]) is None


def test_the_base_model_hits_activated_adapters_blocks_before_the_invocation(oracle: Oracle) -> None:
    engine, digests = oracle.engine()
    run(engine, [greedy("activated", oracle.prompts["in_block"], 1, digests["in_block"])])
    base = run(engine, [greedy("base", oracle.prompts["in_block"], NUM_TOKENS, logprobs=VOCAB_SIZE)])
    assert base["base", 0].num_cached_tokens == 32
    alone = run(oracle.engine()[0], [greedy("base", oracle.prompts["in_block"], NUM_TOKENS)])
    assert base["base", 0].token_ids == alone["base", 0].token_ids


@pytest.mark.parametrize("architecture", ["lfm2", "qwen3_5"])
@pytest.mark.parametrize("num_rows", [1024, 33])
def test_activated_adapters_on_recurrent_layers_equal_peft(
    oracle_of: OracleOf, architecture: str, num_rows: int
) -> None:
    oracle = oracle_of(architecture)
    engine, digests = oracle.engine(max_num_batched_tokens=num_rows)
    assert not wrong_answers(oracle, run_one_by_one(engine, oracle.requests(digests)))
    answers = run(engine, oracle.requests(digests, "again-"))
    assert not wrong_answers(oracle, answers, "again-")
    for name, num_tokens in cached_tokens(oracle).items():  # more where another prompt saved a later state
        assert answers[f"again-{name}", 0].num_cached_tokens >= num_tokens


@pytest.mark.parametrize("architecture", ["lfm2", "qwen3_5"])
@pytest.mark.parametrize("name", sorted(PLACES))
def test_activated_adapters_continue_from_the_base_models_state_before_the_invocation(
    oracle_of: OracleOf, architecture: str, name: str
) -> None:
    oracle = oracle_of(architecture)
    engine, digests = oracle.engine()
    prompt, start = oracle.prompts[name], PLACES[name][1]
    run(engine, [greedy("base", [*prompt[:start], *range(UNCERTAIN_TOKENS)], 1)])
    first, again = (run(engine, [request]) for request in _twice(oracle, digests, name))
    of_base = start // 16 * 16
    assert first[f"first-{name}", 0].num_cached_tokens == of_base
    assert again[f"again-{name}", 0].num_cached_tokens == max(cached_tokens(oracle)[name], of_base)
    for answers, prefix in ((first, "first-"), (again, "again-")):
        assert differs(oracle.references[name], answers[f"{prefix}{name}", 0]) is None


@pytest.mark.parametrize("architecture", ["lfm2", "qwen3_5"])
def test_the_base_model_continues_from_activated_adapters_states_before_the_invocation_alone(
    oracle_of: OracleOf, architecture: str
) -> None:
    oracle = oracle_of(architecture)
    engine, digests = oracle.engine(max_num_batched_tokens=40)  # the first step ends after the invocation's start
    prompt = oracle.prompts["in_block"]
    run(engine, [greedy("activated", prompt, 1, digests["in_block"])])
    base = run(engine, [greedy("base", prompt, NUM_TOKENS)])["base", 0]
    assert base.num_cached_tokens == 32
    assert base.token_ids == run(oracle.engine()[0], [greedy("base", prompt, NUM_TOKENS)])["base", 0].token_ids


def test_plain_adapters_do_not_hit_activated_adapters_blocks(oracle: Oracle) -> None:
    engine, digests = oracle.engine()
    run(engine, [greedy("activated", oracle.prompts["late"], 1, digests["late"])])
    plain = run(engine, [greedy("plain", oracle.prompts["late"], 1, digests["plain"])])
    assert plain["plain", 0].num_cached_tokens == 0


def test_tokens_after_an_earlier_invocation_are_not_prefix_hits_if_a_later_one_counts(oracle: Oracle) -> None:
    """The model's answer after one invocation is part of the next prompt, before another invocation."""
    engine, digests = oracle.engine()
    turn = [*range(40), *SHORT, *range(40, 66)]
    first = run(engine, [greedy("first", turn, 30, digests["in_block"])])["first", 0]
    longer = [*turn, *first.token_ids, *SHORT, 7]
    found = run(engine, [greedy("second", longer, NUM_TOKENS, digests["in_block"])])["second", 0]
    alone = run(oracle.engine()[0], [greedy("second", longer, NUM_TOKENS, digests["in_block"])])["second", 0]
    assert found.num_cached_tokens == 32
    assert found.token_ids == alone.token_ids


def test_a_prompt_without_the_invocation_is_refused(oracle: Oracle) -> None:
    engine, digests = oracle.engine()
    with pytest.raises(EngineRequestError, match=r"does not contain .* tokens \[250, 251, 252, 253, 254\]"):
        engine.add_request(greedy("without", [*range(30), *LONG[:-1]], 1, digests["late"]))
    assert not engine.has_work()
    engine.unload_adapter(digests["late"] or "")
    assert engine.take_unloaded() == [digests["late"]]


def _twice(oracle: Oracle, digests: dict[str | None, str | None], name: str) -> list[EngineRequest]:
    return [
        greedy(f"{prefix}{name}", oracle.prompts[name], NUM_TOKENS, digests[name], logprobs=VOCAB_SIZE)
        for prefix in ("first-", "again-")
    ]


def _prompt_logprobs(answer: Answer) -> list[dict[int, float]]:
    assert answer.prompt_logprobs is not None
    return [dict(entry.top) for entry in answer.prompt_logprobs if entry is not None]
