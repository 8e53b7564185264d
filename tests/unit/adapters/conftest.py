"""Tiny transformers models with random weights, and the adapters that PEFT saves for them."""

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loraserve_adapters.base_layout import BaseLayout, BaseModule
from loraserve_adapters.packed_file import layout_fingerprint
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
)

from tests.unit.adapters.folders import HIDDEN, INTERMEDIATE, VOCABULARY

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}

SaveAdapter = Callable[..., Path]


@pytest.fixture(autouse=True)
def _quiet_peft() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(peft|transformers)\b.*")
        warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*")
        yield


def layout_of(model: PreTrainedModel, dtype: str = "float32") -> BaseLayout:
    """The layout as the engine describes it: the embedding, then linears grouped by their input."""
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    sha256 = _sha256(embedding.weight, dtype)
    groups = [(BaseModule("model.embed_tokens", *embedding.weight.shape, sha256, is_embedding=True),)]
    done: set[str] = set()
    for name in linears:
        if name in done:
            continue
        parent, _, last = name.rpartition(".")
        fused = next((names for names in FUSED if last in names), (last,))
        members = [f"{parent}.{member}" if parent else member for member in fused]
        done.update(members)
        described = [_describe(member, linears[member], linears[member] is head, dtype) for member in members]
        is_tied = linears[name] is head and head.weight is embedding.weight
        groups.append(tuple(replace(module, is_tied=is_tied) for module in described))
    return BaseLayout(
        fingerprint=layout_fingerprint(groups, dtype),
        dtype=dtype,
        groups=tuple(groups),
        other_modules=tuple(
            name for name, module in model.named_modules() if name and name not in linears and module is not embedding
        ),
    )


def _describe(name: str, linear: nn.Linear, is_head: bool, dtype: str) -> BaseModule:
    weight, bias = (
        _sha256(tensor, dtype) if is_head and tensor is not None else None for tensor in (linear.weight, linear.bias)
    )
    return BaseModule(name, linear.in_features, linear.out_features, weight, bias_sha256=bias)


def _sha256(tensor: Tensor, dtype: str) -> str:
    values = tensor.detach().to(getattr(torch, dtype)).contiguous().view(torch.uint8).numpy()
    return hashlib.sha256(values.tobytes()).hexdigest()


def make_llama(tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=tied))


def make_phi() -> PhiForCausalLM:
    """A model whose `lm_head` has a bias."""
    torch.manual_seed(0)
    model = PhiForCausalLM(PhiConfig(**SIZES, pad_token_id=0))
    nn.init.normal_(model.lm_head.bias)
    return model


def make_phi3() -> Phi3ForCausalLM:
    torch.manual_seed(0)
    return Phi3ForCausalLM(Phi3Config(**SIZES, num_key_value_heads=2, pad_token_id=0))


@pytest.fixture
def save_adapter(tmp_path: Path) -> SaveAdapter:
    """save_adapter(model, dtype=…, save=…, **LoraConfig fields) → folder that PEFT wrote, with random A and B."""

    def save(
        model: PreTrainedModel, *, dtype: torch.dtype = torch.float32, save: dict[str, Any] | None = None, **fields: Any
    ) -> Path:
        folder = tmp_path / f"adapter{len(list(tmp_path.iterdir()))}"
        peft_model = get_peft_model(model, LoraConfig(**fields))
        assert isinstance(peft_model, PeftModel)
        randomise(peft_model, dtype)
        peft_model.save_pretrained(str(folder), **(save or {}))
        return folder

    return save


def randomise(model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)
        if name.endswith("trainable_tokens_delta.default"):  # PEFT initializes it with the base's rows
            parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)


def edit_config(folder: Path, **fields: Any) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder
