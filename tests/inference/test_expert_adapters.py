"""Adapters on experts in forms other than the usual one, against PEFT."""

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from loraserve_kernels.reference_backend import ReferenceBackend
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, Qwen3MoeConfig

from loraserve.models.causal_model import CausalModel
from tests.support.peft_oracle import NUM_TOKENS, VOCAB_SIZE, Oracle, run_all
from tests.support.tiny_adapters import randomize, reference_answers, without_adapter
from tests.support.tiny_models import COMMON, EXPERTS, random_model, save_model

NUM_EXPERTS, RANK = 4, 3
MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "mixtral": EXPERTS["mixtral"],
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **COMMON, num_experts=NUM_EXPERTS, num_experts_per_tok=2, head_dim=16, moe_intermediate_size=32
    ),
}
NAMES = {
    "mixtral": ("block_sparse_moe", ("w1", "w3"), "w2"),
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj"), "down_proj"),
}
"""Of the linears that experts were before transformers 5: parent module, gate and up, down."""


def linears_of_experts(name: str, model: PreTrainedModel, layers: range, seed: int) -> dict[str, Tensor]:
    """As PEFT wrote them when experts were linears."""
    generator = torch.Generator().manual_seed(seed)
    where, ups, down = NAMES[name]
    down_proj = model.get_parameter("model.layers.0.mlp.experts.down_proj")
    _, hidden_size, intermediate_size = down_proj.shape
    features = {**dict.fromkeys(ups, (hidden_size, intermediate_size)), down: (intermediate_size, hidden_size)}
    tensors: dict[str, Tensor] = {}
    for layer in layers:
        for expert in range(NUM_EXPERTS):
            for linear, (in_features, out_features) in features.items():
                key = f"base_model.model.model.layers.{layer}.{where}.experts.{expert}.{linear}"
                a = torch.randn(RANK, in_features, generator=generator) / in_features**0.5
                tensors[f"{key}.lora_A.weight"] = a
                tensors[f"{key}.lora_B.weight"] = torch.randn(out_features, RANK, generator=generator) / RANK**0.5
    return tensors


def linear(name: str, out_features: int, layers: range) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tensors: dict[str, Tensor] = {}
    for layer in layers:
        key = f"base_model.model.model.layers.{layer}.{name}"
        tensors[f"{key}.lora_A.weight"] = torch.randn(RANK, 64, generator=generator) / 8
        tensors[f"{key}.lora_B.weight"] = torch.randn(out_features, RANK, generator=generator) / RANK**0.5
    return tensors


def write(folder: Path, tensors: Mapping[str, Tensor], **fields: object) -> Path:
    folder.mkdir()
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 6, **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def equals_peft(folder: Path, model: PreTrainedModel, adapters: dict[str, Path], backend: str) -> bool:
    save_model(model, folder / "model")
    rng = random.Random(0)
    prompts: dict[str | None, list[int]] = {
        name: [rng.randrange(256) for _ in range(rng.randrange(9, 30))] for name in [None, *adapters]
    }
    references = reference_answers(model, adapters, prompts, NUM_TOKENS, VOCAB_SIZE)
    _, wrong = run_all(Oracle(folder, folder / "model", adapters, prompts, references), backend=backend)
    return not wrong


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", MODELS)
def test_adapters_trained_when_experts_were_linears_equal_peft(name: str, backend: str, tmp_path: Path) -> None:
    model = random_model(MODELS[name]())
    where, ups, down = NAMES[name]
    all_layers = range(3)
    down_alone = {key: value for key, value in linears_of_experts(name, model, all_layers, 7).items() if down in key}
    adapters = {
        "all": write(
            tmp_path / "all",
            linears_of_experts(name, model, all_layers, 3) | linear("self_attn.q_proj", 64, all_layers),
            target_modules=["q_proj", *ups, down],
        ),
        "router": write(
            tmp_path / "router",
            linear(f"{where}.gate", NUM_EXPERTS, all_layers) | linears_of_experts(name, model, all_layers, 8),
            target_modules=["gate", *ups, down],
        ),
        "layer": write(
            tmp_path / "layer",
            linears_of_experts(name, model, range(1, 2), 4),
            target_modules=[*ups, down],
            layers_to_transform=[1],
        ),
        "down": write(tmp_path / "down", down_alone, target_modules=[down]),
    }
    assert equals_peft(tmp_path, model, adapters, backend)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", MODELS)
def test_all_linear_adapters_with_routers_equal_peft(name: str, backend: str, tmp_path: Path) -> None:
    """What PEFT saves for "all-linear" if all experts are one weight."""
    model = random_model(MODELS[name]())
    peft_model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=6, target_modules="all-linear"))
    randomize(peft_model, 2)
    peft_model.save_pretrained(str(tmp_path / "all_linear"))
    tensors = load_file(tmp_path / "all_linear/adapter_model.safetensors")
    assert "base_model.model.model.layers.2.mlp.gate.lora_B.weight" in tensors
    assert "base_model.model.model.layers.2.mlp.experts.base_layer.lora_B.weight" in tensors
    adapters = {"all_linear": tmp_path / "all_linear"}
    assert equals_peft(tmp_path, without_adapter(peft_model), adapters, backend)


def test_expert_adapters_whose_parameters_peft_saved_in_reverse_order_equal_peft(tmp_path: Path) -> None:
    """Happens if one process trains several: one on `gate_up_proj` alone makes that the module's last parameter."""
    model = random_model(MODELS["mixtral"]())
    for targets in (["gate_up_proj"], ["gate_up_proj", "down_proj"]):
        peft_model = get_peft_model(model, LoraConfig(r=RANK, target_modules=["q_proj"], target_parameters=targets))
        randomize(peft_model, 0)
        peft_model(input_ids=torch.tensor([[1, 2, 3]]))
        peft_model.save_pretrained(str(tmp_path / "saved"))
        model = without_adapter(peft_model)
    tensors = load_file(tmp_path / "saved/adapter_model.safetensors")
    inner = "base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight"
    assert tensors[inner].shape[1] == COMMON["intermediate_size"]  # the input size of down_proj
    config = json.loads((tmp_path / "saved/adapter_config.json").read_text())
    in_order = write(tmp_path / "in_order", {_other_owner(key): tensor for key, tensor in tensors.items()}, **config)
    model = random_model(MODELS["mixtral"]())
    prompts: dict[str | None, list[int]] = {"saved": [*range(40, 60)]}
    references = reference_answers(model, {"saved": in_order}, prompts, NUM_TOKENS, VOCAB_SIZE)
    save_model(model, tmp_path / "model")
    adapters = {"saved": tmp_path / "saved"}
    _, wrong = run_all(Oracle(tmp_path, tmp_path / "model", adapters, prompts, references))
    assert not wrong


def test_experts_with_a_modified_forward_are_kept_and_cannot_have_adapters() -> None:
    model = random_model(MODELS["mixtral"]())
    experts = model.get_submodule("model.layers.1.mlp.experts")
    original = experts.forward
    experts.forward = lambda *arguments: 2 * original(*arguments)
    causal_model = CausalModel(model, ReferenceBackend())
    names = [module.name for group in causal_model.layout.groups for module in group]
    assert "model.layers.1.mlp.gate.weight" in names
    assert not [name for name in names if "experts" in name]
    causal_model.prepare(128, 260, lambda *_: None)


def _other_owner(key: str) -> str:
    if ".experts.base_layer." in key:
        return key.replace(".base_layer", "")
    return key.replace(".experts.", ".experts.base_layer.")
