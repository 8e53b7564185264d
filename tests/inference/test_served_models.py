"""Families that the oracle leaves out: loading checks their logits, and some are compared with PEFT here."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from loraserve_kernels.reference_backend import ReferenceBackend
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    FalconH1Config,
    GPTJConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    GraniteMoeSWAConfig,
    GraniteSWAConfig,
    HunYuanMoEV1Config,
    Lfm2MoeConfig,
    ModernBertDecoderConfig,
    NemotronHConfig,
    OlmoeConfig,
    OlmoHybridConfig,
    PhiConfig,
    PhimoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5MoeTextConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from loraserve.models.causal_model import CausalModel
from tests.support.peft_oracle import NUM_TOKENS, VOCAB_SIZE, Oracle, run_all
from tests.support.tiny_adapters import randomize, reference_answers, without_adapter
from tests.support.tiny_models import COMMON, WINDOW, random_model, save_model, tiny_model

LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
LINEAR_ATTENTION = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
SHARED_EXPERTS = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
SERVED: dict[str, Callable[[], PreTrainedConfig]] = {
    "falcon_h1": lambda: FalconH1Config(**COMMON, **MAMBA, mamba_d_ssm=128),
    "granitemoe": lambda: GraniteMoeConfig(**COMMON, **LOCAL_EXPERTS),
    "granitemoe_swa": lambda: GraniteMoeSWAConfig(**COMMON, **LOCAL_EXPERTS, sliding_window=WINDOW),
    "granite_swa": lambda: GraniteSWAConfig(**COMMON, sliding_window=WINDOW),
    "granitemoehybrid": lambda: GraniteMoeHybridConfig(
        **COMMON,
        **MAMBA,
        **LOCAL_EXPERTS,
        layer_types=["mamba", "attention", "mamba"],
        shared_intermediate_size=64,
    ),
    "hunyuan_v1_moe": lambda: HunYuanMoEV1Config(**COMMON, head_dim=16, num_experts=4, moe_topk=2),
    "lfm2_moe": lambda: Lfm2MoeConfig(
        **COMMON, **EXPERTS, layer_types=["conv", "full_attention", "conv"], moe_intermediate_size=32
    ),
    "nemotron_h": lambda: NemotronHConfig(
        **{name: value for name, value in COMMON.items() if name != "num_hidden_layers"},
        hybrid_override_pattern="M*-M",
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=16,
    ),
    "olmo_hybrid": lambda: OlmoHybridConfig(
        **{name: value for name, value in COMMON.items() if name != "num_hidden_layers"},
        num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    ),
    "olmoe": lambda: OlmoeConfig(**COMMON, **EXPERTS),
    "phimoe": lambda: PhimoeConfig(**COMMON, **LOCAL_EXPERTS),
    "qwen3_5_moe": lambda: Qwen3_5MoeTextConfig(**COMMON, **EXPERTS, **SHARED_EXPERTS, **LINEAR_ATTENTION),
    "qwen3_moe": lambda: Qwen3MoeConfig(**COMMON, **EXPERTS, head_dim=16, moe_intermediate_size=32),
    "qwen3_next": lambda: Qwen3NextConfig(**COMMON, **EXPERTS, **SHARED_EXPERTS, **LINEAR_ATTENTION),
}


@pytest.mark.parametrize("name", sorted(SERVED))
def test_family_passes_the_load_checks(name: str) -> None:
    CausalModel(random_model(SERVED[name]()), ReferenceBackend()).prepare(128, 260, lambda *_: None)


PARALLEL: dict[str, tuple[Callable[[], PreTrainedConfig], list[str]]] = {
    "gptj": (
        lambda: GPTJConfig(
            vocab_size=260,
            n_positions=256,
            n_embd=64,
            n_layer=3,
            n_head=4,
            rotary_dim=8,
            bos_token_id=256,
            eos_token_id=257,
            tie_word_embeddings=False,
        ),
        ["q_proj", "v_proj", "out_proj", "fc_in", "fc_out", "lm_head"],
    ),
    "phi": (lambda: PhiConfig(**COMMON), ["q_proj", "v_proj", "dense", "fc1", "fc2", "lm_head"]),
    "phi_qk": (lambda: PhiConfig(**COMMON, qk_layernorm=True), ["k_proj", "dense", "fc1"]),
}
"""(config, adapter targets). Attention parallel to the MLP, part of each head rotated, biases in `lm_head` too."""


def oracle_of_two(model: PreTrainedModel, targets: list[str], folder: Path) -> Oracle:
    save_model(model, folder / "model")
    adapters: dict[str, Path] = {}
    for seed, name in enumerate(["one", "other"]):
        peft_model = get_peft_model(model, LoraConfig(r=3, target_modules=targets))
        randomize(peft_model, seed)
        peft_model.save_pretrained(str(folder / name))
        model = without_adapter(peft_model)
        adapters[name] = folder / name
    rng = random.Random(0)
    prompts: dict[str | None, list[int]] = {
        name: [rng.randrange(256) for _ in range(length)] for name, length in ((None, 5), ("one", 19), ("other", 26))
    }
    references = reference_answers(model, adapters, prompts, NUM_TOKENS, VOCAB_SIZE)
    return Oracle(folder, folder / "model", adapters, prompts, references)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_both_linears_of_a_head_get_the_adapters_of_the_sampled_rows(backend: str, tmp_path: Path) -> None:
    """Both linears of ModernBERT's head see only those rows."""
    model = random_model(ModernBertDecoderConfig(**COMMON))
    _, wrong = run_all(oracle_of_two(model, ["q_proj", "dense"], tmp_path), backend=backend)
    assert not wrong


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", sorted(PARALLEL))
def test_layers_with_attention_parallel_to_the_mlp_equal_peft(name: str, backend: str, tmp_path: Path) -> None:
    config, targets = PARALLEL[name]
    _, wrong = run_all(oracle_of_two(random_model(config()), targets, tmp_path), backend=backend)
    assert not wrong


class NormOfParts(nn.Module):
    """Splits a norm's output into parts and mixes each part as a separate row."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.mix = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.norm(x).unflatten(-1, (-1, 16))).flatten(-2)


def test_a_linear_whose_rows_are_not_tokens_cannot_have_adapters() -> None:
    model = tiny_model("llama")
    model.set_submodule("model.norm", NormOfParts(model.get_submodule("model.norm")))
    causal_model = CausalModel(model.eval(), ReferenceBackend())
    causal_model.prepare(128, 260, lambda *_: None)
    assert "model.norm.mix" in causal_model.layout.other_modules
