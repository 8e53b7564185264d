"""Multi-head latent attention: adapters of every kind on its linears, beside each other, against PEFT in float32."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.pack import load_and_pack
from loraserve_adapters.packed_file import packed_file_name
from peft import LoraConfig
from transformers import DeepseekV2Config, DeepseekV3Config, Glm4MoeLiteConfig, PreTrainedConfig

from loraserve.engine.engine import Engine
from loraserve.engine.request import EngineRequest, SamplingParams
from loraserve.models import structure
from tests.support.engines import add_adapters, greedy, make_engine, run
from tests.support.peft_oracle import (
    LOGIT_TOLERANCE,
    NUM_TOKENS,
    VOCAB_SIZE,
    Oracle,
    cached_tokens,
    logits_difference,
    oracle_of_saved,
    run_all,
    wrong_answers,
)
from tests.support.tiny_adapters import Reference, reference_answers, save_adapters
from tests.support.tiny_models import COMMON, LATENT, random_model, save_model, save_tiny_model

EXPERTS = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
}
OWN = COMMON | {"num_key_value_heads": 4} | EXPERTS
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "deepseek_v2": lambda: DeepseekV2Config(
        **OWN, kv_lora_rank=24, q_lora_rank=None, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=20
    ),
    "deepseek_v3": lambda: DeepseekV3Config(
        **OWN, kv_lora_rank=40, q_lora_rank=32, qk_nope_head_dim=12, qk_rope_head_dim=16, v_head_dim=28
    ),
    "glm4_moe_lite": lambda: Glm4MoeLiteConfig(
        **OWN,
        kv_lora_rank=16,
        q_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=24,
        mlp_layer_types=["dense", "sparse", "sparse"],
    ),
}
ATTENTION = ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
INVOCATION = [250, 251]


def configs(_model: object) -> dict[str, LoraConfig]:
    return {
        "all": LoraConfig(r=8, lora_alpha=16, target_modules=ATTENTION),
        "up_alone": LoraConfig(r=17, lora_alpha=17, target_modules=["kv_b_proj"]),
        "biased": LoraConfig(r=4, lora_alpha=8, target_modules=["kv_b_proj", "o_proj"], lora_bias=True),
        "dora": LoraConfig(r=5, lora_alpha=20, use_dora=True, target_modules=["kv_b_proj", "kv_a_proj_with_mqa"]),
        "others": LoraConfig(r=4, use_rslora=True, target_modules=["kv_a_proj_with_mqa", "o_proj"]),
    }


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp(request.param)
    model = random_model(CONFIGS[request.param]())
    save_model(model, folder / "model")
    return oracle_of_saved(model, folder, configs)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_adapters_in_one_batch_equal_peft(oracle: Oracle, backend: str) -> None:
    _, wrong = run_all(oracle, backend=backend)
    assert not wrong


def test_prompts_in_chunks_and_prefix_hits_equal_peft(oracle: Oracle) -> None:
    engine, wrong = run_all(oracle, max_num_batched_tokens=11)
    assert not wrong
    answers = run(engine, oracle.requests(add_again(engine, oracle), "second-"))
    assert not wrong_answers(oracle, answers, "second-")
    hits = {name: answers[f"second-{name}", 0].num_cached_tokens for name in oracle.prompts}
    assert hits == cached_tokens(oracle)


def add_again(engine: Engine, oracle: Oracle) -> dict[str | None, str | None]:
    layout = engine.describe().layout
    folder = oracle.folder / oracle.packed
    return {None: None} | {name: load_and_pack(path, layout, folder).digest for name, path in oracle.adapters.items()}


def test_keys_and_values_of_different_sizes_equal_peft(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: keys and values of all heads are cached, values with zeros behind them."""
    monkeypatch.setattr(structure, "find_latent", lambda *_: None)
    expanded = replace(oracle, packed="packed-expanded")
    engine, wrong = run_all(expanded)
    assert not wrong
    assert len(engine._runner._caches) == 2 * 3


def test_a_token_takes_one_latent_per_layer(tmp_path: Path) -> None:
    save_tiny_model("minicpm3", tmp_path)
    engine = make_engine(tmp_path)
    config = LATENT["minicpm3"]()
    size = config.kv_lora_rank + config.qk_rope_head_dim
    assert [cache.shape[1:] for cache in engine._runner._caches] == [(1, 16, size)] * 3
    rows = 100 * 16
    small = make_engine(tmp_path, kv_cache_memory_bytes=3 * rows * size * 4 + 7)
    assert small.describe().num_blocks == 100


@pytest.mark.parametrize("family", sorted(LATENT))
def test_choices_of_one_prompt_equal_separate_requests(tmp_path: Path, family: str) -> None:
    save_tiny_model(family, tmp_path)
    rng = random.Random(2)
    prompt = [rng.randrange(250) for _ in range(37)]

    def asked(n: int, seed: int) -> EngineRequest:
        params = SamplingParams(max_tokens=25, n=n, seed=seed, ignore_eos=True)
        return EngineRequest("r", prompt, params)

    together = run(make_engine(tmp_path), [asked(3, 50)])
    alone = make_engine(tmp_path, enable_prefix_caching=False)
    for index in range(3):
        assert together["r", index].token_ids == run(alone, [asked(1, 50 + index)])["r", 0].token_ids


def test_bfloat16_is_as_close_as_peft_in_bfloat16(tmp_path: Path) -> None:
    model = save_tiny_model("minicpm3", tmp_path / "model")
    oracle = oracle_of_saved(model, tmp_path, configs).on("cpu", "bfloat16")
    _, wrong = run_all(oracle)
    assert not wrong


@dataclass(frozen=True, slots=True)
class Activated:
    """Adapters of a model whose base tokens have the base's keys, which one of the up-projection would change."""

    folder: Path
    adapters: dict[str, Path]
    prompt: list[int]
    expected: Reference
    """PEFT's answer with `fits`."""


@pytest.fixture(scope="module")
def activated(tmp_path_factory: pytest.TempPathFactory) -> Activated:
    folder = tmp_path_factory.mktemp("activated")
    model = save_tiny_model("minicpm3", folder / "model")
    targets = {"fits": ["q_b_proj", "kv_a_proj_with_mqa", "o_proj"], "up": ["kv_b_proj", "o_proj"]}
    of_each = {
        name: LoraConfig(r=4, target_modules=found, alora_invocation_tokens=INVOCATION, task_type="CAUSAL_LM")
        for name, found in targets.items()
    }
    adapters = save_adapters(model, folder / "adapters", of_each)
    prompt = [*range(40), *INVOCATION, *range(100, 110)]
    answers = reference_answers(model, {"fits": adapters["fits"]}, {"fits": prompt}, NUM_TOKENS, VOCAB_SIZE)
    return Activated(folder, adapters, prompt, answers["fits"])


def test_activated_adapters_of_other_linears_equal_peft(activated: Activated) -> None:
    engine = make_engine(activated.folder / "model")
    digest = add_adapters(engine, {"fits": activated.adapters["fits"]}, activated.folder / "packed")["fits"]
    answer = run(engine, [greedy("r", activated.prompt, NUM_TOKENS, digest, logprobs=VOCAB_SIZE)])["r", 0]
    assert answer.token_ids == activated.expected.token_ids
    for row, entry in zip(activated.expected.logits, answer.logprobs, strict=True):
        logprobs = torch.tensor([value for _, value in sorted(entry.top)])
        assert logits_difference(row, logprobs) <= LOGIT_TOLERANCE


def test_activated_adapters_of_the_up_projection_are_refused(activated: Activated) -> None:
    engine = make_engine(activated.folder / "model")
    reason = r"alora_invocation_tokens: cannot target .*layers\.0.*kv_b_proj"
    with pytest.raises(AdapterError, match=reason) as refused:
        load_and_pack(activated.adapters["up"], engine.describe().layout, activated.folder)
    assert (refused.value.code, refused.value.key) == ("unsupported_option", "alora_invocation_tokens")


def test_an_engine_refuses_such_an_adapter_that_another_one_packed(
    activated: Activated, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = activated.folder
    with monkeypatch.context() as expanded:
        expanded.setattr(structure, "find_latent", lambda *_: None)
        layout = make_engine(folder / "model").describe().layout
    digest = load_and_pack(activated.adapters["up"], layout, folder).digest
    with pytest.raises(AdapterError, match="up-projection of latent attention"):
        make_engine(folder / "model").load_adapter(digest, str(folder / packed_file_name(digest, layout)))
