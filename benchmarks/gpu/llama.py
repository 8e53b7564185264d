"""An 8-billion-parameter Llama without weights, adapters for it, and their sizes in bytes. All are bfloat16."""

from collections.abc import Sequence
from pathlib import Path

import torch
from gpu.work import AdapterKind
from peft import LoraConfig
from safetensors.torch import save_file
from shapes import ALL_LINEAR
from transformers import AutoModelForCausalLM, LlamaConfig

DTYPE = torch.bfloat16


def llama_8b() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )


def read_weight_bytes(config: LlamaConfig) -> int:
    """Bytes of the weights that a decode step reads: all but the embedding table, unless the head is tied to it."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE)
    num_elements = sum(parameter.numel() for parameter in model.parameters())
    table = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return (num_elements - table) * DTYPE.itemsize


def kv_bytes_per_token(config: LlamaConfig) -> int:
    return 2 * config.num_hidden_layers * _key_width(config) * DTYPE.itemsize


def adapter_bytes(config: LlamaConfig, kind: AdapterKind) -> float:
    """Bytes of an adapter's matrices, averaged over the ranks."""
    widths = sum(width_in + width_out for width_in, width_out in _linear_widths(config, kind).values())
    return config.num_hidden_layers * widths * kind.mean(kind.lora_ranks) * DTYPE.itemsize


def num_adapter_matrices(config: LlamaConfig) -> int:
    """Upper bound for one adapter."""
    return 2 * config.num_hidden_layers * len(ALL_LINEAR)


def save_adapter(config: LlamaConfig, kind: AdapterKind, lora_rank: int, folder: Path) -> None:
    """Saves one as PEFT does; both matrices are random."""
    torch.manual_seed(0)
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for linear, (width_in, width_out) in _linear_widths(config, kind).items():
            prefix = f"base_model.model.model.layers.{layer}.{linear}"
            tensors[f"{prefix}.lora_A.weight"] = (torch.randn(lora_rank, width_in) * 0.02).to(DTYPE)
            tensors[f"{prefix}.lora_B.weight"] = (torch.randn(width_out, lora_rank) * 0.02).to(DTYPE)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    lora_config(lora_rank, kind.linears).save_pretrained(str(folder))


def lora_config(lora_rank: int, linears: Sequence[str]) -> LoraConfig:
    return LoraConfig(r=lora_rank, lora_alpha=lora_rank, target_modules=list(linears), inference_mode=True)


def _linear_widths(config: LlamaConfig, kind: AdapterKind) -> dict[str, tuple[int, int]]:
    """(in, out) of the adapted linears of a layer."""
    hidden, inner, keys = config.hidden_size, config.intermediate_size, _key_width(config)
    assert config.head_dim is not None
    queries = config.num_attention_heads * config.head_dim
    widths = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    return {linear: width for linear, width in widths.items() if linear.partition(".")[2] in kind.linears}


def _key_width(config: LlamaConfig) -> int:
    assert config.num_key_value_heads is not None
    assert config.head_dim is not None
    return config.num_key_value_heads * config.head_dim
