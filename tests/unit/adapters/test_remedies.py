"""What a report says to do about adapters as training saves them in the wrong form."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from loraserve_adapters.checks import Check, Checks
from loraserve_adapters.source import check_adapter

from tests.unit.adapters.folders import (
    HIDDEN,
    VOCABULARY,
    RawTensor,
    config_of,
    lora_tensors,
    raw_tensor,
    tiny_layout,
    write_folder,
)

LAYOUT = tiny_layout()
TENSORS = lora_tensors(LAYOUT, ["q_proj"])


def first_failure(folder: Path) -> Check:
    checks = Checks()
    assert check_adapter(folder, LAYOUT, checks) is None
    return checks.listed()[0]


def first_failure_of(tensors: Mapping[str, RawTensor], folder: Path) -> Check:
    return first_failure(write_folder(folder, config_of(), tensors))


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("base_model.model.", "", "rename its tensors as that names them"),
        ("base_model.model.", "module.base_model.model.", "rename its tensors as that names them"),
        ("lora_A.", "lora_A.default.", "without an adapter name"),
        ("model.layers", "_orig_mod.model.layers", "without _orig_mod"),
        (".self_attn", "._orig_mod.self_attn", "without _orig_mod"),
        (".self_attn", "._fsdp_wrapped_module.self_attn", "without _fsdp_wrapped_module"),
        (
            ".self_attn",
            "._fsdp_wrapped_module._checkpoint_wrapped_module.self_attn",
            "without _fsdp_wrapped_module and _checkpoint_wrapped_module",
        ),
    ],
)
def test_names_that_peft_does_not_write_are_to_be_saved_again_or_renamed(
    old: str, new: str, text: str, tmp_path: Path
) -> None:
    """As a state_dict() has them that training saved by itself, of a wrapped or compiled model."""
    failure = first_failure_of({name.replace(old, new, 1): tensor for name, tensor in TENSORS.items()}, tmp_path)
    assert failure.remedy is not None
    assert failure.remedy.startswith("Save the adapter with PEFT's save_pretrained, or rename its tensors")
    assert text in f"{failure.message} {failure.remedy}"


def test_a_tensor_of_another_method_is_not_to_be_renamed(tmp_path: Path) -> None:
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_diag"
    failure = first_failure_of({**TENSORS, key: raw_tensor(np.ones(4, np.float32))}, tmp_path)
    assert (failure.key, failure.code) == (key, "unexpected_tensor")
    assert "rename" not in (failure.remedy or "")


@pytest.mark.parametrize("shape", [[0], [0, HIDDEN]])
def test_empty_tensors_are_explained_as_parameters_that_were_not_gathered(shape: list[int], tmp_path: Path) -> None:
    failure = first_failure_of(dict.fromkeys(TENSORS, ("F32", shape, b"")), tmp_path)
    assert f"found {shape}, expected [4, 32]: empty, as DeepSpeed ZeRO-3 saves" in failure.message
    assert "stage3_gather_16bit_weights_on_model_save" in (failure.remedy or "")


def test_a_resized_vocabulary_is_explained(tmp_path: Path) -> None:
    tables = raw_tensor(np.ones((VOCABULARY + 2, HIDDEN), np.float32))
    failure = first_failure_of({**TENSORS, "base_model.model.lm_head.weight": tables}, tmp_path)
    assert failure.code == "base_weight_differs"
    assert "trainable_token_indices" in (failure.remedy or "")


def test_a_pickle_is_to_be_saved_again(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, config_of(), TENSORS)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    failure = first_failure(folder)
    assert (failure.code, failure.file) == ("missing_file", "adapter_model.safetensors")
    assert "safe_serialization=True" in (failure.remedy or "")


def test_the_config_of_another_library_is_recognized_before_its_fields(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, config_of(), TENSORS)
    fields = {"adapter_path": "adapters", "fine_tune_type": "lora", "lora_parameters": {"rank": 8, "scale": 20.0}}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    failure = first_failure(folder)
    assert (failure.key, failure.remedy) == ("peft_type", "Convert it to PEFT's format.")
    assert "not the config of a PEFT adapter" in failure.message
