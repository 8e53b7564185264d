"""Copies of demo adapters with something changed: different content, or something that must be refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.demo_questions import ADAPTER_DIR

Tensors = dict[str, Tensor]


def variant(
    folder: Path,
    adapter: str,
    change_config: Callable[[dict[str, Any]], object] = lambda _: None,
    change_tensors: Callable[[Tensors], object] = lambda _: None,
) -> Path:
    """Writes the copy to `folder`, which must not exist."""
    shutil.copytree(ADAPTER_DIR / adapter, folder)
    config_file, tensors_file = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    config, tensors = json.loads(config_file.read_text()), load_file(tensors_file)
    change_config(config)
    change_tensors(tensors)
    config_file.write_text(json.dumps(config))
    save_file(tensors, tensors_file, metadata={"format": "pt"})  # as PEFT does
    return folder


def twin(folder: Path, adapter: str) -> Path:
    """Answers like the original but is different content: alpha differs by a thousandth."""
    return variant(folder, adapter, lambda config: config.update(lora_alpha=config["lora_alpha"] * 1.001))


def classifier(folder: Path, adapter: str, labels: list[str], score_template: str | None = None) -> Path:
    """A copy with a random head, which gives different texts different labels."""

    def change_config(config: dict[str, Any]) -> None:
        id2label = {str(number): label for number, label in enumerate(labels)}
        config.update(task_type="SEQ_CLS", modules_to_save=["classifier", "score"], id2label=id2label)
        if score_template is not None:
            config["score_template"] = score_template

    def add_head(tensors: Tensors) -> None:
        hidden_size = tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape[1]
        head = torch.randn(len(labels), hidden_size, generator=torch.Generator().manual_seed(0))
        tensors["base_model.model.score.weight"] = head / hidden_size**0.5

    return variant(folder, adapter, change_config, add_head)
