"""Models and adapters with real shapes and random weights, created once and kept in a folder."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
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
        tokenizer_of(shape.config.vocab_size).save_pretrained(path)
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


def make_idle_adapters(name: str, folder: Path, count: int) -> Path:
    """A folder of `count` adapters as PEFT's defaults make them, rank 8 on q_proj and v_proj, all different."""
    parent = folder / f"{name}-idle-adapters"
    config = shapes()[name].config
    missing = [path for i in range(count) if not (path := parent / f"idle-{i:04d}").exists()]
    widths = {
        "q_proj": config.num_attention_heads * config.head_dim,
        "v_proj": config.num_key_value_heads * config.head_dim,
    }
    for path in missing:
        torch.manual_seed(int(path.name.removeprefix("idle-")))
        tensors = {}
        for layer in range(config.num_hidden_layers):
            for linear, width in widths.items():
                prefix = f"base_model.model.model.layers.{layer}.self_attn.{linear}"
                tensors[f"{prefix}.lora_A.weight"] = torch.randn(8, config.hidden_size) * 0.02
                tensors[f"{prefix}.lora_B.weight"] = torch.randn(width, 8) * 0.02
        path.mkdir(parents=True)
        dtype = shapes()[name].dtype
        save_file({key: tensor.to(dtype) for key, tensor in tensors.items()}, path / "adapter_model.safetensors")
        LoraConfig(r=8, lora_alpha=8, target_modules=list(widths), inference_mode=True).save_pretrained(str(path))
    return parent


def adapter_bytes(path: Path) -> int:
    return (path / "adapter_model.safetensors").stat().st_size


def model_bytes(path: Path) -> int:
    """Bytes of the weights read in a decode step: all but the embedding table, unless `lm_head` is tied to it."""
    config = json.loads((path / "config.json").read_text())
    total = (path / "model.safetensors").stat().st_size
    element_bytes = 2 if config["dtype"] == "bfloat16" else 4
    return (
        total if config["tie_word_embeddings"] else total - config["vocab_size"] * config["hidden_size"] * element_bytes
    )


def kv_bytes_per_token(path: Path) -> int:
    config = json.loads((path / "config.json").read_text())
    element_bytes = 2 if config["dtype"] == "bfloat16" else 4
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * element_bytes


def tokenizer_of(vocab_size: int) -> PreTrainedTokenizerFast:
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
