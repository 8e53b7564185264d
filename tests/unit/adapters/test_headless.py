"""Adapters of the model without its head: how they are interpreted, and which are refused."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loraserve_adapters.base_layout import BaseLayout, BaseModule
from loraserve_adapters.checks import Check, Checks, CheckStatus
from loraserve_adapters.clean_files import clean_config
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.headless import body_name, without_head
from loraserve_adapters.pack import load_and_pack
from loraserve_adapters.source import SourceAdapter, check_adapter, read_adapter

from tests.unit.adapters.folders import (
    HIDDEN,
    NUM_EXPERTS,
    OF_EXPERT,
    TOWER_LINEARS,
    VOCABULARY,
    RawTensor,
    config_of,
    experts_layout,
    head_weight,
    lora_key,
    lora_pair,
    lora_tensors,
    magnitude_key,
    multimodal_layout,
    raw_tensor,
    tiny_layout,
    tower_tensors,
    with_embedding,
    with_magnitudes,
    write_folder,
)

Tensors = Mapping[str, RawTensor]

LAYOUT = tiny_layout()
WHOLE = lora_tensors(LAYOUT, ["q_proj"])
TASK_TYPES = [{"task_type": "FEATURE_EXTRACTION"}, {"task_type": None}, {}]


def headless(tensors: Tensors) -> dict[str, RawTensor]:
    """The tensors under the names that PEFT gives them on `AutoModel`."""
    return {name.replace("base_model.model.model.", "base_model.model."): tensor for name, tensor in tensors.items()}


def read(folder: Path, tensors: Tensors, layout: BaseLayout = LAYOUT, **fields: Any) -> SourceAdapter:
    return read_adapter(
        write_folder(folder, config_of(**{"task_type": "FEATURE_EXTRACTION", **fields}), tensors), layout
    )


def refusal(folder: Path, tensors: Tensors, layout: BaseLayout = LAYOUT, **fields: Any) -> AdapterError:
    with pytest.raises(AdapterError) as refused:
        read(folder, tensors, layout, **fields)
    return refused.value


def targeted(source: SourceAdapter) -> dict[str, tuple[int, float]]:
    targets = (module.target for module in source.modules)
    return {target.module.name: (target.lora_rank, target.scaling) for target in targets}


def checked(folder: Path, tensors: Tensors, layout: BaseLayout = LAYOUT, **fields: Any) -> list[Check]:
    checks = Checks()
    config = config_of(**{"task_type": "FEATURE_EXTRACTION", **fields})
    check_adapter(write_folder(folder, config, tensors), layout, checks)
    return checks.listed()


@pytest.mark.parametrize("fields", TASK_TYPES)
def test_is_packed_like_the_same_adapter_of_the_whole_model(fields: dict[str, Any], tmp_path: Path) -> None:
    of_whole = load_and_pack(write_folder(tmp_path / "whole", config_of(), WHOLE), LAYOUT, tmp_path)
    folder = write_folder(tmp_path / "headless", config_of(**fields), headless(WHOLE))
    packed = load_and_pack(folder, LAYOUT, tmp_path)
    assert bytes(packed.payload) == bytes(of_whole.payload)
    assert packed.table.offset_a.tolist() == of_whole.table.offset_a.tolist()
    assert packed.table.layout_fingerprint == LAYOUT.fingerprint
    assert packed.digest != of_whole.digest  # computed from the source's own names
    source = read_adapter(folder, LAYOUT)
    assert source.judged.is_headless
    assert source.summary.target_modules == ("q_proj",)


def test_magnitudes_may_have_headless_names_too(tmp_path: Path) -> None:
    tensors, config = with_magnitudes(WHOLE), config_of(use_dora=True)
    of_whole = load_and_pack(write_folder(tmp_path / "whole", config, tensors), LAYOUT, tmp_path)
    packed = load_and_pack(write_folder(tmp_path / "headless", config, headless(tensors)), LAYOUT, tmp_path)
    assert bytes(packed.payload) == bytes(of_whole.payload)
    assert packed.table.offset_magnitude.tolist() == of_whole.table.offset_magnitude.tolist()
    error = refusal(tmp_path, headless(tensors), use_dora=True, task_type="CAUSAL_LM")
    assert (error.code, error.key) == ("unknown_module", magnitude_key("layers.0.self_attn.q_proj"))
    assert "Set task_type to FEATURE_EXTRACTION" in (error.remedy or "")


def test_the_digest_does_not_depend_on_the_task_type(tmp_path: Path) -> None:
    folders = [write_folder(tmp_path / str(n), config_of(**task), headless(WHOLE)) for n, task in enumerate(TASK_TYPES)]
    assert len({read_adapter(folder, LAYOUT).digest for folder in folders}) == 1


@pytest.mark.parametrize("names", ["whole", "headless"])
def test_the_clean_config_has_the_task_type_that_matches_the_tensor_names(names: str, tmp_path: Path) -> None:
    """Both kinds may have a config without a task type; the stored config names the right one."""
    source = read(tmp_path, WHOLE if names == "whole" else headless(WHOLE), task_type=None)
    (tmp_path / "adapter_config.json").write_bytes(clean_config(source.config, is_headless=source.judged.is_headless))
    again = read_adapter(tmp_path, LAYOUT)
    assert again.config.task_type == ("CAUSAL_LM" if names == "whole" else "FEATURE_EXTRACTION")
    assert (again.digest, again.modules) == (source.digest, source.modules)


@pytest.mark.parametrize("fields", TASK_TYPES)
def test_whole_model_names_mean_the_whole_model_whatever_the_task_type(fields: dict[str, Any], tmp_path: Path) -> None:
    """As PEFT saves them for `AutoModelForCausalLM`, whose `lm_head` may then be targeted."""
    tensors = lora_tensors(LAYOUT, ["q_proj", "lm_head"])
    source = read(tmp_path, tensors, target_modules=[r"q_proj", "lm_head"], **fields)
    assert not source.judged.is_headless
    assert "lm_head" in targeted(source)
    only_head = read(tmp_path, lora_tensors(LAYOUT, ["lm_head"]), target_modules=["lm_head"], **fields)
    assert [*targeted(only_head)] == ["lm_head"]


Q0, Q1 = (f"model.layers.{layer}.self_attn.q_proj" for layer in range(2))


@pytest.mark.parametrize(
    ("fields", "ranks"),
    [
        ({"target_modules": ["layers.0.self_attn.q_proj"]}, {Q0: 4}),
        ({"target_modules": r"layers\.[01]\..*q_proj"}, {Q0: 4, Q1: 4}),
        ({"exclude_modules": ["layers.1.self_attn.q_proj"]}, {Q0: 4}),
        ({"layers_to_transform": [1], "layers_pattern": "layers"}, {Q1: 4}),
        ({"rank_pattern": {"^layers.0.self_attn.q_proj": 2, "model.layers.1.self_attn.q_proj": 3}}, {Q0: 2, Q1: 4}),
    ],
)
def test_config_entries_match_names_without_the_body_prefix(
    fields: dict[str, Any], ranks: dict[str, int], tmp_path: Path
) -> None:
    tensors: dict[str, RawTensor] = {}
    for name, rank in ranks.items():
        tensors |= lora_pair(name.removeprefix("model."), HIDDEN, HIDDEN, rank)
    source = read(tmp_path, tensors, alpha_pattern={"^layers.0.*": 16}, **fields)
    assert targeted(source) == {name: (rank, (16 if name == Q0 else 8) / rank) for name, rank in ranks.items()}


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": r"model\.layers\..*q_proj"},
        {"target_modules": ["model.layers.0.self_attn.q_proj"]},
        {"target_modules": ["lm_head"]},
        # PEFT looks for the number after the second dot, so it finds no module either.
        {"layers_to_transform": [0]},
    ],
)
def test_config_entries_with_whole_model_names_match_nothing(fields: dict[str, Any], tmp_path: Path) -> None:
    error = refusal(tmp_path, headless(WHOLE), **fields)
    assert (error.code, error.file) == ("unknown_module", "adapter_config.json")
    assert "the base model without its head" in error.message


def test_a_mix_of_whole_model_and_headless_names_is_refused(tmp_path: Path) -> None:
    name = lora_key("layers.1.self_attn.q_proj", "B")
    tensors = {**WHOLE, name: WHOLE[lora_key(Q1, "B")]}
    del tensors[lora_key(Q1, "B")]
    for fields in TASK_TYPES:
        error = refusal(tmp_path, tensors, **fields)
        assert (error.code, error.key) == ("unknown_module", name)
        assert "all tensors must have such names" in error.message
        assert "base_model.model. to base_model.model.model." in (error.remedy or "")


def test_all_tensors_under_both_kinds_of_names_are_refused_too(tmp_path: Path) -> None:
    error = refusal(tmp_path, {**WHOLE, **headless(WHOLE)})
    assert (error.code, error.key) == ("unknown_module", lora_key("layers.0.self_attn.q_proj", "A"))


def test_headless_names_with_task_type_causal_lm_are_refused(tmp_path: Path) -> None:
    error = refusal(tmp_path, headless(WHOLE), task_type="CAUSAL_LM")
    assert (error.code, error.key) == ("unknown_module", lora_key("layers.0.self_attn.q_proj", "A"))
    assert "FEATURE_EXTRACTION" in error.message
    assert "Set task_type to FEATURE_EXTRACTION" in (error.remedy or "")


@pytest.mark.parametrize("name", [lora_key("lm_head", "A"), "base_model.model.lm_head.weight"])
def test_a_tensor_of_the_head_among_headless_names_is_refused(name: str, tmp_path: Path) -> None:
    tensors = headless(WHOLE) | {name: raw_tensor(head_weight())}
    error = refusal(tmp_path, tensors, target_modules=["q_proj", "lm_head"])
    assert error.key == name
    assert error.code in ("unknown_module", "unexpected_tensor")


def test_a_target_entry_that_names_the_head_is_a_warning_because_peft_tolerates_it(tmp_path: Path) -> None:
    checks = checked(tmp_path, headless(WHOLE), target_modules=["q_proj", "lm_head"])
    (warning,) = [check for check in checks if check.status is not CheckStatus.PASS]
    assert (warning.status, warning.code, warning.found) == (CheckStatus.WARN, "unused_entry", '"lm_head"')
    assert warning.message.endswith("names no module of the base model without its head")


def test_a_missing_tensor_is_reported_by_its_headless_name(tmp_path: Path) -> None:
    name = lora_key("layers.1.self_attn.q_proj", "B")
    tensors = headless(WHOLE)
    del tensors[name]
    error = refusal(tmp_path, tensors)
    assert (error.code, error.key) == ("missing_tensor", name)


def test_wrong_ranks_and_values_are_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, headless(WHOLE), r=8).code == "rank_mismatch"
    name = lora_key("layers.0.self_attn.q_proj", "A")
    nan = raw_tensor(np.full((4, HIDDEN), np.nan, np.float32))
    assert refusal(tmp_path, {**headless(WHOLE), name: nan}).code == "not_finite"


def test_an_embedding_and_a_copy_of_its_table_are_accepted(tmp_path: Path) -> None:
    layout, key = with_embedding(LAYOUT), "base_model.model.embed_tokens"
    tensors = {
        f"{key}.lora_embedding_A": raw_tensor(np.ones((4, VOCABULARY), np.float32)),
        f"{key}.lora_embedding_B": raw_tensor(np.ones((HIDDEN, 4), np.float32)),
    }
    source = read(
        tmp_path,
        tensors | {f"{key}.base_layer.weight": raw_tensor(head_weight())},
        layout,
        target_modules=["embed_tokens"],
    )
    assert [*targeted(source)] == ["model.embed_tokens"]
    other = {f"{key}.base_layer.weight": raw_tensor(head_weight() + 1)}
    assert refusal(tmp_path, tensors | other, layout, target_modules=["embed_tokens"]).code == "base_weight_differs"


def test_experts_are_accepted_under_current_and_former_names(tmp_path: Path) -> None:
    layout = experts_layout(num_layers=1)
    names = ["model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"]
    block = "layers.0.mlp.experts"
    of_weights = lora_pair(f"{block}.base_layer", HIDDEN, 2 * OF_EXPERT, 4 * NUM_EXPERTS) | lora_pair(
        block, OF_EXPERT, HIDDEN, 4 * NUM_EXPERTS
    )
    source = read(tmp_path, of_weights, layout, target_modules=[], target_parameters=["gate_up_proj", "down_proj"])
    assert [*targeted(source)] == names
    of_linears: dict[str, RawTensor] = {}
    for expert in range(NUM_EXPERTS):
        for linear in ("gate_proj", "up_proj"):
            of_linears |= lora_pair(f"{block}.{expert}.{linear}", HIDDEN, OF_EXPERT)
    former = read(tmp_path, of_linears, layout, target_modules=["gate_proj", "up_proj"])
    assert targeted(former) == {names[0]: (8, 2.0)}


def test_tensors_of_modules_that_text_never_reaches_are_ignored(tmp_path: Path) -> None:
    layout = multimodal_layout()
    text = lora_tensors(layout, ["q_proj"])
    source = read(tmp_path, headless(text | tower_tensors(TOWER_LINEARS[::2])), layout)
    assert {entry.name for module in source.modules for entry in module.entries} == headless(text).keys()
    assert all(name.startswith("model.language_model.layers.") for name in targeted(source))


@pytest.mark.parametrize(
    ("served", "layers"), [(tiny_layout(), "language_model.layers"), (multimodal_layout(), "layers")]
)
def test_headless_names_may_be_those_of_the_class_that_is_not_served(
    served: BaseLayout, layers: str, tmp_path: Path
) -> None:
    """For example, those of `AutoModel` of the text-only class."""
    tensors = {name.replace("model.layers", f"model.{layers}"): tensor for name, tensor in headless(WHOLE).items()}
    source = read(tmp_path, tensors, served, alpha_pattern={f"^{layers}.0.*": 16})
    assert source.judged.is_headless
    names = [module.name for group in served.groups for module in group if module.name.endswith("q_proj")]
    assert targeted(source) == dict(zip(names, [(4, 4.0), (4, 2.0)], strict=True))
    error = refusal(tmp_path, tensors, served, task_type="CAUSAL_LM")
    assert (error.code, error.key) == ("unknown_module", lora_key(f"{layers}.0.self_attn.q_proj", "A"))


def test_the_body_is_the_root_of_the_first_modules_name() -> None:
    assert body_name(LAYOUT) == "model"
    assert body_name(without_head(LAYOUT)) is None
    flat = replace(LAYOUT, groups=((BaseModule("q_proj", HIDDEN, HIDDEN),), *LAYOUT.groups))
    assert body_name(flat) is None


def test_a_model_without_a_body_has_only_its_own_names(tmp_path: Path) -> None:
    flat = replace(LAYOUT, groups=((BaseModule("q_proj", HIDDEN, HIDDEN),),), other_modules=(), embedding_modules=())
    source = read(tmp_path, lora_pair("q_proj", HIDDEN, HIDDEN), flat)
    assert (targeted(source), source.judged.is_headless) == ({"q_proj": (4, 2.0)}, False)
