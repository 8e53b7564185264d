"""Adapters of routers and experts, named by their weights or by the linears that they used to consist of."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loraserve_adapters.base_layout import BaseLayout
from loraserve_adapters.checks import Check, Checks, CheckStatus
from loraserve_adapters.config import parse_config
from loraserve_adapters.dtypes import STORAGE, convert
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.pack import load_and_pack
from loraserve_adapters.packed import PackedAdapter
from loraserve_adapters.source import SourceAdapter, check_adapter, read_adapter
from loraserve_adapters.targets import Selection, resolve_targets

from tests.unit.adapters.folders import (
    HIDDEN,
    INTERMEDIATE,
    NUM_EXPERTS,
    OF_EXPERT,
    RawTensor,
    config_of,
    experts_layout,
    lora_key,
    lora_pair,
    lora_tensors,
    raw_tensor,
    values_of,
    with_magnitudes,
    write_folder,
)

LAYOUT = experts_layout()
ONE_LAYER = experts_layout(num_layers=1)
WITH_SHARED_EXPERT = experts_layout(shared_expert=True)
BLOCK = "model.layers.0.mlp"
UP, DOWN, ROUTER = f"{BLOCK}.experts.gate_up_proj", f"{BLOCK}.experts.down_proj", f"{BLOCK}.gate.weight"
INNER, OUTER = f"{BLOCK}.experts.base_layer", f"{BLOCK}.experts"
FEATURES = {
    "gate_proj": (HIDDEN, OF_EXPERT),
    "up_proj": (HIDDEN, OF_EXPERT),
    "down_proj": (OF_EXPERT, HIDDEN),
    "w1": (HIDDEN, OF_EXPERT),
    "w3": (HIDDEN, OF_EXPERT),
    "w2": (OF_EXPERT, HIDDEN),
}
"""(in_features, out_features) of an expert's linears; w1, w3 and w2 are Mixtral's names."""
BOTH = config_of(target_modules=[], target_parameters=["gate_up_proj", "down_proj"])
LINEARS = config_of(target_modules=["gate_proj", "up_proj", "down_proj"])


def select(layout: BaseLayout = LAYOUT, **fields: Any) -> Selection:
    return resolve_targets(parse_config(json.dumps(config_of(**fields)).encode()), layout)


def targeted(**fields: Any) -> list[str]:
    return [target.module.name for target in select(**fields).targets]


def of_weights(rank: int = 4, dtype: str = "float32") -> dict[str, RawTensor]:
    """Tensors of both expert weights of layer 0, as PEFT writes them."""
    up = lora_pair(INNER, HIDDEN, 2 * OF_EXPERT, rank * NUM_EXPERTS, dtype=dtype)
    return up | lora_pair(OUTER, OF_EXPERT, HIDDEN, rank * NUM_EXPERTS, dtype=dtype)


def of_experts(
    *linears: str, where: str = f"{BLOCK}.experts", ranks: Mapping[str, int] | None = None, dtype: str = "float32"
) -> dict[str, RawTensor]:
    """Tensors of each expert's linears in layer 0, as PEFT wrote them for transformers 4."""
    tensors: dict[str, RawTensor] = {}
    for expert in range(NUM_EXPERTS):
        for linear in linears or ("gate_proj", "up_proj", "down_proj"):
            rank = (ranks or {}).get(linear, 4)
            tensors |= lora_pair(f"{where}.{expert}.{linear}", *FEATURES[linear], rank, dtype=dtype)
    return tensors


def read(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, RawTensor], layout: BaseLayout = ONE_LAYER
) -> SourceAdapter:
    return read_adapter(write_folder(folder, config, tensors), layout)


def refusal(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, RawTensor], layout: BaseLayout = ONE_LAYER
) -> AdapterError:
    with pytest.raises(AdapterError) as refused:
        read(folder, config, tensors, layout)
    return refused.value


def checked(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, RawTensor], layout: BaseLayout, status: CheckStatus
) -> list[Check]:
    checks = Checks()
    check_adapter(write_folder(folder, config, tensors), layout, checks)
    return [check for check in checks.listed() if check.status is status]


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        (["down_proj"], ["0.mlp.experts.down_proj", "1.mlp.experts.down_proj"]),
        (["experts.down_proj"], ["0.mlp.experts.down_proj", "1.mlp.experts.down_proj"]),
        (["mlp.gate.weight"], ["0.mlp.gate.weight", "1.mlp.gate.weight"]),
        (["1.mlp.experts.gate_up_proj"], ["1.mlp.experts.gate_up_proj"]),
        ([DOWN, UP], ["0.mlp.experts.gate_up_proj", "0.mlp.experts.down_proj"]),
    ],
)
def test_target_parameters_are_dotted_suffixes_of_names(parameters: list[str], expected: list[str]) -> None:
    assert targeted(target_modules=[], target_parameters=parameters) == [f"model.layers.{name}" for name in expected]


@pytest.mark.parametrize("entry", ["proj", "perts.down_proj", "experts", ".*down_proj", "q_proj", "mlp.gate"])
def test_target_parameters_that_are_partial_names_patterns_or_modules_are_refused(entry: str) -> None:
    with pytest.raises(AdapterError) as refused:
        select(target_modules=[], target_parameters=[entry])
    assert refused.value.code == "unknown_module"


@pytest.mark.parametrize(
    "fields", [{"exclude_modules": ["experts", "down_proj"]}, {"exclude_modules": ".*"}, {"layers_to_transform": [1]}]
)
def test_target_parameters_apply_to_all_layers_and_are_never_excluded_as_in_peft(fields: dict[str, Any]) -> None:
    names = targeted(target_parameters=["down_proj"], **fields)
    assert [name for name in names if "experts" in name] == [DOWN, DOWN.replace("0", "1")]


def test_layers_to_transform_has_no_effect_without_target_modules() -> None:
    """As in PEFT, which wraps parameters in all layers."""
    names = targeted(target_modules=[], target_parameters=["down_proj"], layers_to_transform=[1, 7])
    assert names == [DOWN, DOWN.replace("0", "1")]


def test_rank_and_alpha_patterns_match_parameter_names() -> None:
    targets = select(
        target_modules=[],
        target_parameters=["gate_up_proj", "down_proj", "gate.weight"],
        rank_pattern={"experts.down_proj": 2, "gate.weight": 1},
        alpha_pattern={r"layers\.1\..*gate_up_proj": 12, "experts": 1},
    ).targets
    assert [(target.lora_rank, target.scaling) for target in targets] == [
        *[(1, 8.0), (4, 2.0), (2, 4.0)],
        *[(1, 8.0), (4, 3.0), (2, 4.0)],
    ]


def test_the_first_of_two_expert_weights_is_the_inner_wrapper() -> None:
    def owners(*parameters: str) -> list[str]:
        return [target.owner for target in select(target_modules=[], target_parameters=[*parameters]).targets][:2]

    assert owners("gate_up_proj", "down_proj") == [INNER, OUTER]
    assert owners("0.mlp.experts.gate_up_proj") == [OUTER]
    assert owners("0.mlp.experts.down_proj") == [OUTER]
    assert owners("0.mlp.gate.weight", "0.mlp.experts.down_proj") == [f"{BLOCK}.gate", OUTER]


@pytest.mark.parametrize("entry", ["experts", "mlp.experts", "mlp"])
def test_target_modules_that_name_expert_modules_are_refused_as_not_linear(entry: str) -> None:
    with pytest.raises(AdapterError, match="is not a linear layer") as refused:
        select(target_modules=["q_proj", entry])
    assert refused.value.code == "unsupported_module"


def test_routers_are_targeted_by_their_former_linear_names(tmp_path: Path) -> None:
    assert not select(target_modules=["gate"]).targets
    tensors = lora_pair(f"{BLOCK}.gate", HIDDEN, NUM_EXPERTS)
    (module,) = read(tmp_path, config_of(target_modules=["gate"]), tensors).modules
    assert (module.target.module.name, module.target.lora_rank, module.target.scaling) == (ROUTER, 4, 2.0)


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"target_parameters": ["down_proj", "w_out"]}, "target_parameters"),
        ({"target_parameters": ["q_proj"]}, "target_parameters"),
        ({"target_modules": ["q_proj", "w1", "w9"]}, "target_modules"),
        ({"target_modules": ["q_proj", "gate_up_proj"]}, "target_modules"),
    ],
)
def test_a_target_entry_that_matches_nothing_is_a_warning(fields: dict[str, Any], key: str, tmp_path: Path) -> None:
    tensors = lora_tensors(ONE_LAYER, ["q_proj"])
    if "down_proj" in fields.get("target_parameters", []):
        tensors |= lora_pair(OUTER, OF_EXPERT, HIDDEN, 4 * NUM_EXPERTS)
    (warning,) = checked(tmp_path, config_of(**fields), tensors, ONE_LAYER, CheckStatus.WARN)
    entry = fields[key][-1]
    assert (warning.code, warning.key, warning.found) == ("unused_entry", key, f'"{entry}"')


@pytest.mark.parametrize(
    ("tensor", "shape", "code", "text"),
    [
        (
            lora_key(OUTER, "A"),
            (4, OF_EXPERT),
            "rank_mismatch",
            "rank 4 in adapter_config.json, and there are 4 experts",
        ),
        (
            lora_key(OUTER, "B"),
            (HIDDEN, 12),
            "rank_mismatch",
            "expected [32, 16]: this module has rank",
        ),
        (
            lora_key(INNER, "A"),
            (8, HIDDEN),
            "rank_mismatch",
            "expected [16, 32]: this module has rank",
        ),
        (lora_key(INNER, "B"), (OF_EXPERT, 16), "shape_mismatch", "found [24, 16], expected [48, 16]"),
        (lora_key(OUTER, "A"), (NUM_EXPERTS, 4, OF_EXPERT), "shape_mismatch", "expected [16, 24]"),
    ],
)
def test_expected_shapes_of_expert_weights_include_the_number_of_experts(
    tensor: str, shape: tuple[int, ...], code: str, text: str, tmp_path: Path
) -> None:
    error = refusal(tmp_path, BOTH, of_weights() | {tensor: raw_tensor(np.ones(shape, np.float32))})
    assert (error.code, error.key) == (code, tensor)
    assert text in error.message
    assert ("4 experts" in error.message) == (code == "rank_mismatch")


def test_expected_shapes_of_one_experts_linear_exclude_the_number_of_experts(tmp_path: Path) -> None:
    name = lora_key(f"{BLOCK}.experts.2.up_proj", "A")
    error = refusal(tmp_path, LINEARS, of_experts() | {name: raw_tensor(np.ones((3, HIDDEN), np.float32))})
    assert (error.code, error.key) == ("rank_mismatch", name)
    assert "found [3, 32], expected [4, 32]" in error.message
    assert "there are" not in error.message


def test_tensors_of_two_expert_weights_are_distinguished_by_shape(tmp_path: Path) -> None:
    swapped = lora_pair(OUTER, HIDDEN, 2 * OF_EXPERT, 16) | lora_pair(INNER, OF_EXPERT, HIDDEN, 16)
    for folder, tensors, up in (("in_order", of_weights(), INNER), ("swapped", swapped, OUTER)):
        modules = read(tmp_path / folder, BOTH, tensors).modules
        assert [module.target.module.name for module in modules] == [UP, DOWN]
        assert modules[0].parts[0].lora_a.name == lora_key(up, "A")


@pytest.mark.parametrize(
    ("config", "tensors"), [(BOTH, of_weights()), (LINEARS, of_experts()), (LINEARS, of_experts("down_proj"))]
)
def test_a_missing_tensor_is_named(config: dict[str, Any], tensors: dict[str, RawTensor], tmp_path: Path) -> None:
    for name in [next(iter(tensors)), [*tensors][-1]]:
        error = refusal(tmp_path, config, {key: value for key, value in tensors.items() if key != name})
        assert (error.code, error.key) == ("missing_tensor", name)


def test_tensors_for_only_one_expert_of_a_layer_are_refused(tmp_path: Path) -> None:
    tensors = {name: value for name, value in of_experts("down_proj").items() if ".experts.2." in name}
    failures = checked(tmp_path, LINEARS, tensors, ONE_LAYER, CheckStatus.FAIL)
    assert {failure.code for failure in failures} == {"missing_tensor"}
    assert len(failures) == 2 * (NUM_EXPERTS - 1)


@pytest.mark.parametrize(
    ("config", "tensors"),
    [
        ({**BOTH, **LINEARS, "target_parameters": ["gate_up_proj", "down_proj"]}, of_weights() | of_experts()),
        (LINEARS, of_experts() | of_weights()),
        (
            config_of(target_modules=["down_proj", "w2"]),
            of_experts("down_proj") | of_experts("w2"),
        ),
        (
            config_of(target_modules=["w2"]),
            of_experts("w2") | of_experts("w2", where="model.layers.0.block_sparse_moe.experts"),
        ),
        (config_of(target_modules=["down_proj"]), of_experts("down_proj") | of_experts("up_proj")),
    ],
)
def test_tensors_in_mixed_naming_forms_are_refused(
    config: dict[str, Any], tensors: dict[str, RawTensor], tmp_path: Path
) -> None:
    error = refusal(tmp_path, config, tensors)
    assert error.code in ("unexpected_tensor", "unknown_module")
    assert error.file == "adapter_model.safetensors"
    assert error.key in tensors


@pytest.mark.parametrize("where", [f"{BLOCK}.experts", "model.layers.0.block_sparse_moe.experts"])
def test_mixtral_names_of_expert_linears_are_accepted(where: str, tmp_path: Path) -> None:
    config = config_of(target_modules=["w1", "w2", "w3"])
    up, down = read(tmp_path, config, of_experts("w1", "w2", "w3", where=where)).modules
    assert [(module.target.module.name, module.target.lora_rank) for module in (up, down)] == [(UP, 8), (DOWN, 4)]
    assert [part.first_output for part in up.parts] == [0] * NUM_EXPERTS + [OF_EXPERT] * NUM_EXPERTS


def test_different_scalings_of_gate_and_up_are_refused(tmp_path: Path) -> None:
    error = refusal(tmp_path, {**LINEARS, "alpha_pattern": {"up_proj": 4}}, of_experts())
    assert (error.code, error.key) == ("unsupported_option", "alpha_pattern")
    assert "gate_proj and up_proj of an expert" in error.message
    assert "[2.0, 1.0]" in error.message
    read(tmp_path, {**LINEARS, "alpha_pattern": {"down_proj": 4}}, of_experts())


@pytest.mark.parametrize("table", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("key", ["experts.1.down_proj", r"experts\.[1-3]\.down_proj", r".*\.3\.[a-z_]+"])
def test_patterns_that_distinguish_experts_of_a_layer_are_refused(table: str, key: str, tmp_path: Path) -> None:
    """All experts of a layer are one weight here, with one rank and one scaling."""
    all_alike = {"rank_pattern": {"layers.0.self_attn.q_proj": 2}, "alpha_pattern": {r"layers\.0.*": 2}}
    error = refusal(tmp_path, {**LINEARS, **all_alike, table: {key: 2}}, of_experts())
    assert (error.code, error.key) == ("unsupported_option", table)
    assert "experts of a layer" in error.message


@pytest.mark.parametrize(
    "key", ["experts.+.down_proj", r"layers\.0\..*down_proj", "layers.0.mlp.experts.[0-3].down_proj"]
)
def test_patterns_that_match_all_experts_of_a_layer_are_accepted(key: str, tmp_path: Path) -> None:
    config = {**LINEARS, "alpha_pattern": {key: 2}}
    assert [module.target.scaling for module in read(tmp_path, config, of_experts()).modules] == [2.0, 0.5]


def test_gate_and_up_may_differ_in_rank_only_if_their_scalings_are_equal(tmp_path: Path) -> None:
    tensors = of_experts(ranks={"up_proj": 2})
    config = {**LINEARS, "rank_pattern": {"up_proj": 2}}
    assert refusal(tmp_path, config, tensors).code == "unsupported_option"
    assert read(tmp_path, {**config, "alpha_pattern": {"up_proj": 4}}, tensors).modules[0].target.lora_rank == 6


def test_the_rank_limit_applies_to_the_sum_of_gate_and_up(tmp_path: Path) -> None:
    for rank in (256, 257):
        tensors = of_experts("gate_proj", "up_proj", ranks={"gate_proj": rank, "up_proj": rank})
        config = config_of(r=rank, target_modules=["gate_proj", "up_proj"])
        if rank == 256:
            assert read(tmp_path, config, tensors).modules[0].target.lora_rank == 512
        else:
            error = refusal(tmp_path, config, tensors)
            assert (error.code, error.key, error.found) == ("rank_too_large", "r", "514")


def test_lora_bias_on_expert_linears_is_refused(tmp_path: Path) -> None:
    config = config_of(target_modules=["q_proj", "down_proj"], lora_bias=True)
    q_proj = lora_tensors(ONE_LAYER, ["q_proj"])
    q_proj["base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias"] = raw_tensor(np.ones(HIDDEN, np.float32))
    assert len(read(tmp_path, config, q_proj).modules) == 1
    error = refusal(tmp_path, config, q_proj | of_experts("down_proj"))
    assert (error.code, error.key) == ("unsupported_option", "lora_bias")


@pytest.mark.parametrize("has_magnitudes", [False, True])
def test_dora_on_expert_linears_and_routers_is_refused(has_magnitudes: bool, tmp_path: Path) -> None:
    config = config_of(target_modules=["q_proj", "down_proj"], use_dora=True)
    q_proj = with_magnitudes(lora_tensors(ONE_LAYER, ["q_proj"]))
    assert len(read(tmp_path, config, q_proj).modules) == 1
    experts, router = of_experts("down_proj"), lora_pair(f"{BLOCK}.gate", HIDDEN, NUM_EXPERTS)
    for targets, tensors in ((["q_proj", "down_proj"], experts), (["q_proj", "gate"], router)):
        tensors = with_magnitudes(tensors) if has_magnitudes else tensors
        error = refusal(tmp_path, {**config, "target_modules": targets}, q_proj | tensors)
        assert (error.code, error.key) == ("unsupported_option", "use_dora")


def test_dora_with_target_parameters_is_refused(tmp_path: Path) -> None:
    error = refusal(tmp_path, {**BOTH, "use_dora": True}, of_weights())
    assert (error.code, error.key) == ("invalid_field", "use_dora")
    assert "target_parameters" in error.message


def test_dora_on_linears_named_like_former_expert_linears_is_accepted(tmp_path: Path) -> None:
    config = config_of(target_modules=["gate_proj"], use_dora=True)
    tensors = with_magnitudes(lora_tensors(WITH_SHARED_EXPERT, ["shared_expert.gate_proj"]))
    assert len(read(tmp_path, config, tensors, WITH_SHARED_EXPERT).modules) == 2


def test_activated_lora_on_expert_linears_is_refused(tmp_path: Path) -> None:
    config = config_of(target_modules=["q_proj", "down_proj"], alora_invocation_tokens=[5])
    assert len(read(tmp_path, config, lora_tensors(ONE_LAYER, ["q_proj"])).modules) == 1
    error = refusal(tmp_path, config, lora_tensors(ONE_LAYER, ["q_proj"]) | of_experts("down_proj"))
    assert (error.code, error.key) == ("unsupported_option", "alora_invocation_tokens")


def test_linears_named_like_former_expert_linears_are_accepted(tmp_path: Path) -> None:
    config = config_of(target_modules=["gate_proj"])
    tensors = lora_tensors(WITH_SHARED_EXPERT, ["shared_expert.gate_proj"])
    assert not checked(tmp_path, config, tensors, WITH_SHARED_EXPERT, CheckStatus.WARN)
    source = read(tmp_path, config, tensors, WITH_SHARED_EXPERT)
    assert [module.target.module.out_features for module in source.modules] == [INTERMEDIATE] * 2
    layer_0 = {name: value for name, value in (tensors | of_experts("gate_proj")).items() if "layers.0" in name}
    both = read(tmp_path, {**config, "layers_to_transform": [0]}, layer_0, WITH_SHARED_EXPERT)
    assert [module.target.module.name for module in both.modules] == [UP, f"{BLOCK}.shared_expert.gate_proj"]


def test_refuses_an_adapter_without_tensors(tmp_path: Path) -> None:
    error = refusal(tmp_path, LINEARS, {})
    assert (error.code, error.file, error.key) == ("unknown_module", "adapter_config.json", "target_modules")


@pytest.mark.parametrize("has_effect", [False, True])
def test_expert_linears_have_no_effect_if_every_b_is_zero(has_effect: bool, tmp_path: Path) -> None:
    tensors = of_experts("down_proj")
    for expert in range(has_effect, NUM_EXPERTS):
        tensors[lora_key(f"{BLOCK}.experts.{expert}.down_proj", "B")] = raw_tensor(np.zeros((HIDDEN, 4), np.float32))
    warnings = checked(tmp_path, config_of(target_modules=["down_proj"]), tensors, ONE_LAYER, CheckStatus.WARN)
    assert [warning.code for warning in warnings] == ([] if has_effect else ["no_effect"])


def a_and_b(packed: PackedAdapter, layout: BaseLayout, name: str) -> tuple[np.ndarray, np.ndarray]:
    """[num_experts, rank, in_features] and [num_experts, rank, out_features], in the layout's dtype."""
    table = packed.table
    values = np.array(packed.payload).view(STORAGE[layout.dtype])
    ((index, module),) = [(i, module) for i, (module,) in enumerate(layout.groups) if module.name == name]
    num_ranks = int(table.lora_rank[index]) * (module.num_matrices or 1)
    found = []
    for start, features in ((table.offset_a, module.in_features), (table.offset_b, module.out_features)):
        matrix = values[int(start[index]) :][: num_ranks * features]
        found.append(matrix.reshape(module.num_matrices or 1, -1, features))
    return found[0], found[1]


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("block_bytes", [4 * 1024 * 1024, 200])
def test_packs_each_expert_as_peft_splits_it(
    dtype: str, block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT: A.reshape(experts, rank, in), B.reshape(out, rank, experts)."""
    monkeypatch.setattr("loraserve_adapters.safetensors_file._BLOCK_BYTES", block_bytes)
    layout = experts_layout(dtype, num_layers=1)
    tensors = of_weights(3)
    packed = load_and_pack(write_folder(tmp_path / "adapter", {**BOTH, "r": 3}, tensors), layout, tmp_path)
    assert packed.table.lora_rank.tolist() == [0, 0, 3, 3]
    for name, owner in ((UP, INNER), (DOWN, OUTER)):
        a, b = a_and_b(packed, layout, name)
        peft_a = values_of(tensors[lora_key(owner, "A")]).reshape(NUM_EXPERTS, 3, -1)
        peft_b = values_of(tensors[lora_key(owner, "B")]).reshape(-1, 3, NUM_EXPERTS)
        assert np.array_equal(a, convert(peft_a, "float32", dtype))
        assert np.array_equal(b, convert(peft_b.transpose(2, 1, 0), "float32", dtype))


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("block_bytes", [4 * 1024 * 1024, 40])
@pytest.mark.parametrize(
    ("linears", "ranks"),
    [
        (("gate_proj", "up_proj"), {}),
        (("gate_proj", "up_proj"), {"gate_proj": 2, "up_proj": 5}),
        (("gate_proj",), {"gate_proj": 3}),
        (("up_proj",), {"up_proj": 3}),
        (("down_proj",), {"down_proj": 3}),
    ],
)
def test_packs_the_linears_of_an_expert_together(
    linears: tuple[str, ...],
    ranks: dict[str, int],
    block_bytes: int,
    dtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A has gate's ranks before up's; B has zeros at the other linear's outputs."""
    monkeypatch.setattr("loraserve_adapters.safetensors_file._BLOCK_BYTES", block_bytes)
    layout = experts_layout(dtype, num_layers=1)
    tensors = of_experts(*linears, ranks=ranks)
    config = config_of(
        target_modules=[*linears], rank_pattern=ranks, alpha_pattern={name: 2 * rank for name, rank in ranks.items()}
    )
    packed = load_and_pack(write_folder(tmp_path / "adapter", config, tensors), layout, tmp_path)
    name = DOWN if linears == ("down_proj",) else UP
    a, b = a_and_b(packed, layout, name)
    expected_b = np.zeros((NUM_EXPERTS, sum(ranks.get(linear, 4) for linear in linears), b.shape[2]), np.float32)
    for expert in range(NUM_EXPERTS):
        keys = [f"{BLOCK}.experts.{expert}.{linear}" for linear in linears]
        expected_a = np.concatenate([values_of(tensors[lora_key(key, "A")]) for key in keys])
        assert np.array_equal(a[expert], convert(expected_a, "float32", dtype))
        first_rank = 0
        for linear, key in zip(linears, keys, strict=True):
            part = values_of(tensors[lora_key(key, "B")]).T
            first = OF_EXPERT if linear == "up_proj" else 0
            expected_b[expert, first_rank : first_rank + len(part), first : first + part.shape[1]] = part
            first_rank += len(part)
    assert np.array_equal(b, convert(expected_b, "float32", dtype))
    assert packed.table.scaling.max() == 2.0


def test_packs_a_router_as_a_linear(tmp_path: Path) -> None:
    tensors = lora_pair(f"{BLOCK}.gate", HIDDEN, NUM_EXPERTS)
    for folder, fields in (
        ("now", {"target_modules": [], "target_parameters": ["gate.weight"]}),
        ("before", {"target_modules": ["gate"]}),
    ):
        packed = load_and_pack(write_folder(tmp_path / folder, config_of(**fields), tensors), ONE_LAYER, tmp_path)
        (a,), (b,) = a_and_b(packed, ONE_LAYER, ROUTER)
        assert np.array_equal(a, values_of(tensors[lora_key(f"{BLOCK}.gate", "A")]))
        assert np.array_equal(b.T, values_of(tensors[lora_key(f"{BLOCK}.gate", "B")]))


def test_expert_linears_with_tensors_in_one_layer_need_them_in_all_targeted_layers(tmp_path: Path) -> None:
    tensors = of_experts()
    error = refusal(tmp_path, LINEARS, tensors, LAYOUT)
    assert (error.code, error.key) == ("missing_tensor", lora_key("model.layers.1.mlp.experts.0.gate_proj", "A"))
    only_layer_0 = read(tmp_path, {**LINEARS, "layers_to_transform": [0]}, tensors, LAYOUT)
    assert [module.target.module.name for module in only_layer_0.modules] == [UP, DOWN]


def test_a_router_targeted_by_its_former_name_needs_tensors(tmp_path: Path) -> None:
    config = config_of(target_modules=["gate", "down_proj"])
    error = refusal(tmp_path, config, of_experts("down_proj"))
    assert (error.code, error.key) == ("missing_tensor", lora_key(f"{BLOCK}.gate", "A"))


def test_patterns_that_would_distinguish_experts_are_accepted_if_no_expert_has_tensors(tmp_path: Path) -> None:
    """Such a pattern may be meant for a layer, here layer 1."""
    config = config_of(target_modules=["gate_proj"], rank_pattern={r".*\.1\..*": 4})
    tensors = lora_tensors(WITH_SHARED_EXPERT, ["shared_expert.gate_proj"])
    assert len(read(tmp_path, config, tensors, WITH_SHARED_EXPERT).modules) == 2
