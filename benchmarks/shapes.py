"""Models and adapters of real shapes with random weights, made once and kept in a folder."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedTokenizerFast, Qwen3Config

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANKS = (8, 16, 32)


@dataclass(frozen=True, slots=True)
class Shape:
    config: PreTrainedConfig
    dtype: torch.dtype


def shapes() -> dict[str, Shape]:
    return {
        "llama-100m": Shape(
            LlamaConfig(
                vocab_size=16_000,
                hidden_size=768,
                intermediate_size=2048,
                num_hidden_layers=12,
                num_attention_heads=12,
                num_key_value_heads=4,
                head_dim=64,
                max_position_embeddings=4096,
                tie_word_embeddings=False,
            ),
            torch.bfloat16,
        ),
        "qwen3-0.6b": Shape(
            Qwen3Config(
                vocab_size=151_936,
                hidden_size=1024,
                intermediate_size=3072,
                num_hidden_layers=28,
                num_attention_heads=16,
                num_key_value_heads=8,
                head_dim=128,
                max_position_embeddings=4096,
                tie_word_embeddings=True,
            ),
            torch.float32,
        ),
    }


def make_model(name: str, folder: Path) -> Path:
    """Random weights of initializer size and a tokenizer that can decode every id."""
    path = folder / name
    if not (path / "model.safetensors").exists():
        shape = shapes()[name]
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(shape.config, dtype=shape.dtype).save_pretrained(path, max_shard_size="20GB")
        _tokenizer(shape.config.vocab_size).save_pretrained(path)
    return path


def make_adapters(name: str, folder: Path, count: int) -> dict[str, Path]:
    """`count` adapters on all linears with ranks 8, 16, 32 in turn, saved by PEFT; both matrices are random."""
    model_path = make_model(name, folder)
    paths = {f"lora-{i:04d}": folder / f"{name}-adapters" / f"lora-{i:04d}" for i in range(count)}
    missing = {adapter: path for adapter, path in paths.items() if not (path / "adapter_model.safetensors").exists()}
    if not missing:
        return paths
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=shapes()[name].dtype)
    for i, (adapter, path) in enumerate(paths.items()):
        if adapter not in missing:
            continue
        rank = RANKS[i % len(RANKS)]
        peft_model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=rank, target_modules=ALL_LINEAR))
        torch.manual_seed(i)
        with torch.no_grad():
            for parameter_name, parameter in peft_model.named_parameters():
                if "lora_" in parameter_name:
                    parameter.normal_(0, 0.02)
        peft_model.to(shapes()[name].dtype).save_pretrained(str(path))
        model = peft_model.unload()
    return paths


def adapter_bytes(path: Path) -> int:
    return (path / "adapter_model.safetensors").stat().st_size


def model_bytes(path: Path) -> int:
    """Of the weights read in a decode step: all but the embedding table, unless `lm_head` is tied to it."""
    config = json.loads((path / "config.json").read_text())
    total = (path / "model.safetensors").stat().st_size
    element_bytes = 2 if config["dtype"] == "bfloat16" else 4
    return (
        total if config["tie_word_embeddings"] else total - config["vocab_size"] * config["hidden_size"] * element_bytes
    )


def _tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = dict.fromkeys(alphabet)
    for number in range(vocab_size):
        a, b, c, d = (number // 26**k % 26 for k in range(4))
        tokens[letters[d] + letters[c] + letters[b] + letters[a]] = None
    vocab = {token: i for i, token in enumerate(list(tokens)[: vocab_size - 1])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
