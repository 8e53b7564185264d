"""Models that would be silently wrong, or never call our attention, are refused by name at load."""

from collections.abc import Callable

import pytest
import torch
from loraserve_kernels.reference_backend import ReferenceBackend
from transformers import (
    AutoModelForCausalLM,
    DeepseekV32Config,
    DogeConfig,
    FalconConfig,
    Llama4TextConfig,
    MiniMaxConfig,
    MiniMaxM3VLTextConfig,
    PreTrainedConfig,
)

from loraserve.models.causal_model import CausalModel
from loraserve.models.errors import ModelRefusedError

COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
MOE = {"num_local_experts": 2, "num_experts_per_tok": 1}
REFUSED: dict[str, Callable[[], PreTrainedConfig]] = {
    "Llama4ForCausalLM": lambda: Llama4TextConfig(**COMMON, **MOE, intermediate_size_mlp=96, attention_chunk_size=8192),
    "MiniMaxForCausalLM": lambda: MiniMaxConfig(**COMMON, **MOE, block_size=8),
    "DogeForCausalLM": lambda: DogeConfig(**COMMON),
    "MiniMaxM3VLForCausalLM": lambda: MiniMaxM3VLTextConfig(
        **COMMON, **MOE, layer_types=["full_attention", "minimax_m3_sparse"] * 2, mlp_layer_types=["dense"] * 4
    ),
    "DeepseekV32ForCausalLM cannot be served: it chooses the keys": lambda: DeepseekV32Config(
        **COMMON | {"num_key_value_heads": 4}, index_topk=16, first_k_dense_replace=4
    ),
    "FalconForCausalLM": lambda: FalconConfig(
        vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4
    ),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_unsupported_models_are_refused_by_name(name: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(REFUSED[name](), dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.4 / parameter.shape[-1] ** 0.5)
    with pytest.raises(ModelRefusedError, match=name):
        CausalModel(model.eval(), ReferenceBackend()).prepare(128, 260, lambda *_: None)
