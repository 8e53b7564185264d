"""Adapters of the class of a model that is not served: how they are interpreted, and which are refused."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loraserve_adapters.base_layout import BaseLayout
from loraserve_adapters.checks import Check, Checks, CheckStatus
from loraserve_adapters.clean_files import clean_config, write_clean_weights
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.headless import without_head
from loraserve_adapters.other_class import names_other_class, other_class
from loraserve_adapters.pack import load_and_pack
from loraserve_adapters.source import SourceAdapter, check_adapter, read_adapter
from loraserve_adapters.trained_tokens import ROWS

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
    multimodal_layout,
    raw_tensor,
    tiny_layout,
    tower_tensors,
    with_embedding,
    write_folder,
)

Tensors = Mapping[str, RawTensor]

TEXT_ONLY, WITH_TOWER = tiny_layout(), multimodal_layout()
SERVED = {"text_only": TEXT_ONLY, "with_tower": WITH_TOWER}
OTHER = {"text_only": WITH_TOWER, "with_tower": TEXT_ONLY}
"""By the class that is served."""


def with_tower(tensors: Tensors) -> dict[str, RawTensor]:
    """Tensors of the text-only class under their names in the other."""
    prefix = "base_model.model.model."
    return {name.replace(prefix, f"{prefix}language_model."): tensor for name, tensor in tensors.items()}


def read(folder: Path, tensors: Tensors, layout: BaseLayout = TEXT_ONLY, **fields: Any) -> SourceAdapter:
    return read_adapter(write_folder(folder, config_of(**fields), tensors), layout)


def refusal(folder: Path, tensors: Tensors, layout: BaseLayout = TEXT_ONLY, **fields: Any) -> AdapterError:
    with pytest.raises(AdapterError) as refused:
        read(folder, tensors, layout, **fields)
    return refused.value


def warned(folder: Path, tensors: Tensors, layout: BaseLayout = TEXT_ONLY, **fields: Any) -> list[Check]:
    checks = Checks()
    assert check_adapter(write_folder(folder, config_of(**fields), tensors), layout, checks) is not None
    return [check for check in checks.listed() if check.status is CheckStatus.WARN]


def targeted(source: SourceAdapter) -> dict[str, tuple[int, float]]:
    targets = (module.target for module in source.modules)
    return {target.module.name: (target.lora_rank, target.scaling) for target in targets}


@pytest.mark.parametrize("served", SERVED)
def test_is_packed_like_the_same_adapter_of_the_served_class(served: str, tmp_path: Path) -> None:
    layout, suffixes = SERVED[served], ["q_proj", "down_proj", "lm_head"]
    config = config_of(target_modules=suffixes)
    folders = [
        write_folder(tmp_path / str(n), config, lora_tensors(of, suffixes))
        for n, of in enumerate((layout, OTHER[served]))
    ]
    own, other = (load_and_pack(folder, layout, tmp_path) for folder in folders)
    assert bytes(other.payload) == bytes(own.payload)
    assert other.table.offset_a.tolist() == own.table.offset_a.tolist()
    assert other.digest != own.digest  # computed from the source's own names
    assert targeted(read_adapter(folders[1], layout)) == targeted(read_adapter(folders[0], layout))


@pytest.mark.parametrize("served", SERVED)
def test_the_clean_files_are_read_in_the_same_way(served: str, tmp_path: Path) -> None:
    tensors = lora_tensors(OTHER[served], ["q_proj"]) | (tower_tensors() if served == "text_only" else {})
    source = read(tmp_path / "sent", tensors, SERVED[served], layers_to_transform=[0, 1], layers_pattern="layers")
    clean = tmp_path / "clean"
    clean.mkdir()
    (clean / "adapter_config.json").write_bytes(clean_config(source.config))
    sent = tmp_path / "sent" / "adapter_model.safetensors"
    with sent.open("rb") as file, (clean / sent.name).open("wb") as target:
        write_clean_weights(file.fileno(), target.fileno(), source.judged.entries)
    again = read_adapter(clean, SERVED[served])
    assert (again.digest, targeted(again)) == (source.digest, targeted(source))


Q0, Q1 = (f"model.layers.{layer}.self_attn.q_proj" for layer in range(2))
UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|linear_attn|mlp|feed_forward|ffn|dense).*?(?:q_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|mlp|feed_forward|ffn|dense)\.(?:(?:k_proj)))"
)
FIELDS: list[tuple[dict[str, Any], dict[str, int]]] = [
    ({"target_modules": UNSLOTH}, {Q0: 4, Q1: 4}),
    ({"target_modules": ["language_model.layers.0.self_attn.q_proj"]}, {Q0: 4}),
    ({"exclude_modules": r"model\.language_model\.layers\.1\..*"}, {Q0: 4}),
    ({"exclude_modules": ["model.layers.1.self_attn.q_proj"]}, {Q0: 4, Q1: 4}),
    ({"layers_to_transform": [1], "layers_pattern": ["language_model.layers"]}, {Q1: 4}),
    ({"rank_pattern": {"^model.language_model.layers.0.*": 2, "^model.layers.1.*": 3}}, {Q0: 2, Q1: 4}),
]


@pytest.mark.parametrize(("fields", "ranks"), FIELDS)
def test_config_entries_match_the_names_of_the_class_with_a_tower(
    fields: dict[str, Any], ranks: dict[str, int], tmp_path: Path
) -> None:
    tensors: dict[str, RawTensor] = {}
    for name, rank in ranks.items():
        tensors |= lora_pair(name, HIDDEN, HIDDEN, rank)
    fields = {"alpha_pattern": {"^model.language_model.layers.0.*": 16}, **fields}
    source = read(tmp_path, with_tower(tensors), **fields)
    assert targeted(source) == {name: (rank, (16 if name == Q0 else 8) / rank) for name, rank in ranks.items()}


def test_config_entries_match_the_names_of_the_text_only_class(tmp_path: Path) -> None:
    tensors = lora_pair(Q0, HIDDEN, HIDDEN) | lora_pair(Q1, HIDDEN, HIDDEN, 2)
    fields = {"target_modules": r"model\.layers\..*q_proj", "rank_pattern": {"^model.layers.1.*": 2}}
    source = read(tmp_path, tensors, WITH_TOWER, **fields)
    assert [*targeted(source).values()] == [(4, 2.0), (2, 4.0)]
    error = refusal(tmp_path, tensors, WITH_TOWER, target_modules=r"model\.language_model\.layers\..*q_proj")
    assert (error.code, error.key) == ("unknown_module", "target_modules")
    assert "the base model's text-only class" in error.message


def test_tables_and_experts_have_the_other_classs_names_too(tmp_path: Path) -> None:
    layout = with_embedding(TEXT_ONLY)
    embedding, linear = "model.language_model.embed_tokens", with_tower(lora_tensors(layout, ["q_proj"]))
    rows = {f"base_model.model.{embedding}.{ROWS}": raw_tensor(np.ones((2, HIDDEN), np.float32))}
    for tokens in ([7, 3], {"language_model.embed_tokens": [7, 3]}):
        source = read(tmp_path, linear | rows, layout, trainable_token_indices=tokens)
        assert {of.tokens.module.name for of in source.judged.trained_rows} == {"model.embed_tokens", "lm_head"}
    table = {f"base_model.model.{embedding}.weight": raw_tensor(head_weight())}
    source = read(tmp_path, linear | table, layout, modules_to_save=["language_model.embed_tokens"])
    assert [own.table.module.name for own in source.judged.own_tables] == ["model.embed_tokens"]
    lora = {
        f"base_model.model.{embedding}.lora_embedding_A": raw_tensor(np.ones((4, VOCABULARY), np.float32)),
        f"base_model.model.{embedding}.lora_embedding_B": raw_tensor(np.ones((HIDDEN, 4), np.float32)),
        f"base_model.model.{embedding}.base_layer.weight": raw_tensor(head_weight()),
    }
    source = read(tmp_path, lora, layout, target_modules=["embed_tokens"])
    assert [*targeted(source)] == ["model.embed_tokens"]
    block = "model.layers.0.mlp.experts"
    experts = lora_pair(block, HIDDEN, 2 * OF_EXPERT, 4 * NUM_EXPERTS)
    parameters = ["language_model.layers.0.mlp.experts.gate_up_proj"]
    source = read(
        tmp_path, with_tower(experts), experts_layout(num_layers=1), target_modules=[], target_parameters=parameters
    )
    assert [*targeted(source)] == [f"{block}.gate_up_proj"]


LINEARS = with_tower(lora_tensors(TEXT_ONLY, ["q_proj"]))


def test_tensors_of_a_tower_are_ignored_whatever_they_are(tmp_path: Path) -> None:
    whole = {"base_model.model.model.visual.merger.weight": raw_tensor(np.ones((2, 2), np.float32))}
    tower = tower_tensors() | whole
    fields = {"target_modules": ["q_proj", "out_proj"], "modules_to_save": ["merger"]}
    source = read(tmp_path / "all", LINEARS | tower, **fields)
    assert {entry.name for entry in source.judged.entries} == LINEARS.keys()
    assert source.digest == read(tmp_path / "decoder", LINEARS, **fields).digest
    warnings = warned(tmp_path / "all", LINEARS | tower, **fields)
    assert [(check.code, check.found) for check in warnings[:2]] == [
        ("unused_entry", '"out_proj"'),
        ("unused_entry", '"merger"'),
    ]
    assert "names no module of the base model's text decoder" in warnings[0].message
    assert (len(warnings), warnings[2].name) == (3, "weights.unused")
    assert f"{len(tower)} tensors are ignored" in warnings[2].message


def test_what_depends_on_the_towers_tensors_is_reported_by_one_check(tmp_path: Path) -> None:
    """Others are stored with content that several tenants may share."""
    alone, beside = (warned(tmp_path, tensors) for tensors in (LINEARS, LINEARS | tower_tensors()))
    assert [check for check in beside if check.name != "weights.unused"] == alone


def test_layers_that_only_the_tower_may_have_are_a_warning(tmp_path: Path) -> None:
    (warning,) = warned(tmp_path, LINEARS, layers_to_transform=[0, 1, 7], layers_pattern="layers")
    assert (warning.code, warning.key) == ("unused_entry", "layers_to_transform")
    assert "the base model's text decoder has no layer 7 with targeted modules" in warning.message
    tensors = lora_tensors(TEXT_ONLY, ["q_proj"])
    error = refusal(tmp_path, tensors, WITH_TOWER, layers_to_transform=[0, 1, 7], layers_pattern="layers")
    assert (error.code, error.key) == ("unknown_module", "layers_to_transform")


def test_every_module_of_the_decoder_needs_its_tensors_and_every_tensor_its_module(tmp_path: Path) -> None:
    name = lora_key("model.language_model.layers.1.self_attn.q_proj", "B")
    error = refusal(tmp_path, {key: tensor for key, tensor in LINEARS.items() if key != name} | tower_tensors())
    assert (error.code, error.key) == ("missing_tensor", name)
    for module in ("model.language_model.layers.1.self_attn.o_proj", "model.language_model.layers.2.mlp.up_proj"):
        error = refusal(tmp_path, LINEARS | lora_pair(module, HIDDEN, HIDDEN))
        assert (error.file, error.key) == ("adapter_model.safetensors", lora_key(module, "A"))
    assert refusal(tmp_path, LINEARS, r=8).code == "rank_mismatch"
    assert refusal(tmp_path, LINEARS | lora_pair("visual.blocks.0.qkv", HIDDEN, HIDDEN)).code == "unknown_module"


def test_a_tower_beside_names_of_the_text_only_class_is_refused(tmp_path: Path) -> None:
    tensors = lora_tensors(TEXT_ONLY, ["q_proj"]) | tower_tensors()
    for layout in (TEXT_ONLY, WITH_TOWER):
        error = refusal(tmp_path, tensors, layout)
        assert (error.code, error.key) == ("unknown_module", lora_key(TOWER_LINEARS[0], "A"))


def test_a_tower_alone_is_refused(tmp_path: Path) -> None:
    error = refusal(tmp_path, tower_tensors(), target_modules=["out_proj"])
    assert (error.code, error.key) == ("unknown_module", "target_modules")


@pytest.mark.parametrize("served", SERVED)
def test_a_mix_of_both_classes_names_is_refused(served: str, tmp_path: Path) -> None:
    tensors, others = (lora_tensors(layout, ["q_proj"]) for layout in (SERVED[served], OTHER[served]))
    name = next(iter(others))
    mixed = dict([*others.items()][:2] + [*tensors.items()][2:])
    for given in (mixed, tensors | others):
        error = refusal(tmp_path, given, SERVED[served])
        assert (error.code, error.key) == ("unknown_module", name)
        assert "then all tensors must have names of that class" in error.message
        assert "in the tensors' names" in (error.remedy or "")


def test_the_error_for_names_of_yet_another_class_gives_the_expected_ones(tmp_path: Path) -> None:
    """Those of classes with towers before transformers 4.52."""
    tensors = lora_tensors(TEXT_ONLY, ["q_proj"])
    former = {name.replace("model.layers", "language_model.model.layers"): tensors[name] for name in tensors}
    error = refusal(tmp_path, former, WITH_TOWER, task_type="CAUSAL_LM")
    assert error.code == "unknown_module"
    change = "base_model.model.language_model.model. to base_model.model.model.language_model."
    assert change in (error.remedy or "")
    assert "all tensors" not in error.message


def test_a_layout_has_another_class_only_if_the_names_mean_nothing_else() -> None:
    there = other_class(TEXT_ONLY)
    assert there is not None
    assert (there.fingerprint, there.is_other_class, there.lacks_modules) == (TEXT_ONLY.fingerprint, True, True)
    assert "model.language_model" in there.other_modules
    back = other_class(WITH_TOWER)
    assert back is not None
    assert back.groups == TEXT_ONLY.groups
    assert (back.lacks_modules, back.unreached_linears) == (False, ())
    assert not {name for name in back.other_modules if "tower" in name or "language" in name}
    assert other_class(there) is None
    assert other_class(without_head(TEXT_ONLY)) is None
    assert other_class(replace(TEXT_ONLY, other_modules=("model.language_model",))) is None
    assert other_class(replace(WITH_TOWER, other_modules=("model.layers",))) is None
    (group, *groups) = WITH_TOWER.groups
    beside = (replace(group[0], name="model.projection.q_proj"), *group[1:])
    assert other_class(replace(WITH_TOWER, groups=(beside, *groups))) is None
    transformer = tuple(
        tuple(replace(module, name=f"transformer.{module.name}") for module in group) for group in TEXT_ONLY.groups
    )
    assert other_class(replace(TEXT_ONLY, groups=transformer, other_modules=())) is None
    assert not names_other_class(LINEARS, replace(TEXT_ONLY, groups=transformer, other_modules=()))
