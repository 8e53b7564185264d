"""Attention is fused only if that computes all that the family's module does, also what no probe would notice."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from loraserve_kernels.reference_backend import ReferenceBackend
from torch import nn
from transformers import Ministral3Config, OlmoConfig, OlmoeConfig, PreTrainedConfig, PreTrainedModel

from loraserve.models import fused_attention, rope
from loraserve.models.attention import AttentionLayer
from loraserve.models.causal_model import CausalModel
from loraserve.models.fused_attention import AttentionParts, FusedAttention
from loraserve.models.rope import FullWidthRotary, RotaryTable
from loraserve.models.structure import AttentionSpec
from tests.support.tiny_models import COMMON, CONFIGS, EXPERTS, random_model

ORIGINAL_LENGTH = 64
FAMILIES = CONFIGS | EXPERTS | {"olmo": lambda: OlmoConfig(**COMMON, clip_qkv=None)}
OTHERS: dict[str, Callable[[], PreTrainedConfig]] = {
    "clamps of projections": lambda: OlmoConfig(**COMMON, clip_qkv=8.0),
    "clamps of normed projections": lambda: OlmoeConfig(**COMMON, num_experts=4, num_experts_per_tok=2, clip_qkv=8.0),
    "queries scaled by their positions": lambda: Ministral3Config(
        **COMMON,
        head_dim=16,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": ORIGINAL_LENGTH,
            "llama_4_scaling_beta": 0.1,
        },
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Two threads wait for each other for seconds while other processes keep both cores busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prepared(config: PreTrainedConfig, max_model_len: int = ORIGINAL_LENGTH) -> PreTrainedModel:
    model = random_model(config)
    CausalModel(model, ReferenceBackend()).prepare(max_model_len, COMMON["vocab_size"], lambda *_: None)
    return model


def num_of(kind: type[nn.Module], model: nn.Module) -> int:
    return sum(isinstance(module, kind) for module in model.modules())


def num_fused(config: PreTrainedConfig, max_model_len: int = ORIGINAL_LENGTH) -> int:
    return num_of(FusedAttention, prepared(config, max_model_len))


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_attention_of_known_kinds_is_fused(name: str) -> None:
    config = FAMILIES[name]()
    assert num_fused(config) == config.num_hidden_layers


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_attention_with_additional_arithmetic_is_not_fused(name: str) -> None:
    assert num_fused(OTHERS[name]()) == 0


def test_attention_that_differs_only_at_the_last_positions_is_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_attention, "uses_only", lambda *_: True)
    config = OTHERS["queries scaled by their positions"]()
    assert num_fused(config, ORIGINAL_LENGTH) == config.num_hidden_layers, "there is nothing to scale"
    assert num_fused(config, 2 * ORIGINAL_LENGTH) == 0


@pytest.mark.parametrize("max_table_bytes", [0, 1 << 20])
def test_rotary_factors_per_pair_are_repeated_per_feature_with_and_without_a_table(
    max_table_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rope, "MAX_TABLE_BYTES", max_table_bytes)
    model = prepared(EXPERTS["gpt_oss"]())
    assert num_of(FusedAttention, model) == model.config.num_hidden_layers
    assert num_of(FullWidthRotary, model) == 1
    assert num_of(RotaryTable, model) == (max_table_bytes > 0)
    assert num_of(FullWidthRotary, prepared(CONFIGS["llama"]())) == 0


def test_fused_attention_that_drops_the_sinks_is_noticed_and_all_modules_are_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def without_sinks(spec: AttentionSpec, parts: AttentionParts, layer: AttentionLayer) -> FusedAttention:
        assert spec.sinks is not None
        return FusedAttention(replace(spec, sinks=None), parts, layer)

    monkeypatch.setattr(fused_attention, "FusedAttention", without_sinks)
    model = prepared(EXPERTS["gpt_oss"]())
    assert num_of(FusedAttention, model) == num_of(FullWidthRotary, model) == 0
