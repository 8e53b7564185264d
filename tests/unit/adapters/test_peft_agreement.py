"""We read what PEFT builds and saves: the same modules, ranks, scalings and bits."""

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loraserve_adapters.base_layout import BaseLayout
from loraserve_adapters.clean_files import has_clean_weights
from loraserve_adapters.config import parse_config
from loraserve_adapters.dtypes import STORAGE
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.headless import without_head
from loraserve_adapters.pack import load_and_pack
from loraserve_adapters.packed import PackedAdapter
from loraserve_adapters.safetensors_file import WEIGHTS_NAME, parse_header
from loraserve_adapters.source import read_adapter
from loraserve_adapters.targets import resolve_targets
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaModel, PreTrainedModel

from tests.unit.adapters.conftest import SaveAdapter, edit_config, layout_of, make_llama, make_phi, make_phi3
from tests.unit.adapters.folders import config_of

PREFIX = "base_model.model."


def unpacked(packed: PackedAdapter, layout: BaseLayout) -> dict[str, tuple[torch.Tensor, torch.Tensor, float]]:
    """name → (A [rank, in], B [out, rank], scaling), read by the layout documented in packed.py."""
    table = packed.table
    values = torch.from_numpy(np.array(packed.payload)).view(getattr(torch, table.dtype))
    result = {}
    member_index = 0
    for group_index, group in enumerate(layout.groups):
        position = int(table.offset_a[group_index])
        for module in group:
            rank = int(table.lora_rank[member_index])
            start_b = int(table.offset_b[member_index])
            if rank:
                a = values[position : position + rank * module.in_features].view(rank, module.in_features)
                position += rank * module.in_features
                b = values[start_b : start_b + rank * module.out_features].view(rank, module.out_features)
                result[module.name] = (a, b.T, float(table.scaling[member_index]))
            else:
                assert start_b == -1
            member_index += 1
    return result


def unpacked_magnitudes(packed: PackedAdapter, layout: BaseLayout) -> dict[str, torch.Tensor]:
    """name → float32 [2, out] for modules with magnitudes, read by the same layout."""
    payload = torch.from_numpy(np.array(packed.payload))
    item_bytes = STORAGE[packed.table.dtype].itemsize
    members = [module for group in layout.groups for module in group]
    return {
        module.name: payload[offset * item_bytes :][: 2 * module.out_features * 4].view(torch.float32).view(2, -1)
        for module, offset in zip(members, packed.table.offset_magnitude.tolist(), strict=True)
        if offset >= 0
    }


def built_by_peft(model: nn.Module) -> dict[str, tuple[int, float]]:
    """name → (rank, scaling) of every LoRA layer."""
    return {
        name.removeprefix(PREFIX): (layer.r["default"], layer.scaling["default"])
        for name, layer in model.named_modules()
        if isinstance(layer, LoraLayer)
    }


def assert_holds_what_peft_saved(folder: Path, layout: BaseLayout, cache_dir: Path, scaling: float) -> None:
    packed = load_and_pack(folder, layout, cache_dir)
    saved = load_file(str(folder / "adapter_model.safetensors"))
    modules, magnitudes = unpacked(packed, layout), unpacked_magnitudes(packed, layout)
    names = {f"{PREFIX}{name}.lora_{side}.weight" for name in modules for side in "AB"}
    names |= {f"{PREFIX}{name}.lora_magnitude_vector" for name in magnitudes}
    assert names == {key for key in saved if ".lora_" in key}
    for name, (magnitude, behind) in magnitudes.items():
        assert torch.equal(magnitude, saved[f"{PREFIX}{name}.lora_magnitude_vector"].float())
        assert not behind.any()
    dtype = getattr(torch, layout.dtype)
    for name, (a, b, found_scaling) in modules.items():
        assert torch.equal(a, saved[f"{PREFIX}{name}.lora_A.weight"].to(dtype))
        assert torch.equal(b, saved[f"{PREFIX}{name}.lora_B.weight"].to(dtype))
        assert found_scaling == pytest.approx(scaling)


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("source_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layout_dtype", ["float32", "bfloat16", "float16"])
def test_packs_what_peft_saved_in_any_dtype(
    source_dtype: str, layout_dtype: str, use_dora: bool, save_adapter: SaveAdapter, tmp_path: Path
) -> None:
    model = make_llama()
    layout = layout_of(model, layout_dtype)
    fields = {"r": 5, "lora_alpha": 10, "target_modules": "all-linear", "use_dora": use_dora}
    folder = save_adapter(model, dtype=getattr(torch, source_dtype), **fields)
    assert_holds_what_peft_saved(folder, layout, tmp_path / "cache", scaling=2.0)
    source = read_adapter(folder, layout)
    summary = source.summary
    assert (summary.dtypes, summary.lora_ranks, len(source.modules)) == ((source_dtype,), (5,), 14)
    assert summary.target_modules == ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("task_type", ["FEATURE_EXTRACTION", None])
def test_packs_what_peft_saved_for_the_model_without_its_head(
    task_type: str | None, save_adapter: SaveAdapter, tmp_path: Path
) -> None:
    model = make_llama()
    layout = layout_of(model)
    targets = ["q_proj", "down_proj", "embed_tokens"]
    folder = save_adapter(model.model, task_type=task_type, r=5, lora_alpha=10, target_modules=targets)
    saved = load_file(str(folder / "adapter_model.safetensors"))
    modules = unpacked(load_and_pack(folder, layout, tmp_path / "cache"), layout)
    assert {name: scaling for name, (_, _, scaling) in modules.items()} == {
        f"model.{name}": scaling for name, (_, scaling) in built_by_peft(model.model).items()
    }
    for name, (a, b, _) in modules.items():
        key = f"{PREFIX}{name.removeprefix('model.')}"
        kinds = ("embedding_A", "embedding_B") if name == "model.embed_tokens" else ("A.weight", "B.weight")
        assert all(torch.equal(x, saved[f"{key}.lora_{kind}"]) for x, kind in zip((a, b), kinds, strict=True))
    assert {name for name in saved if ".lora_" not in name} == {f"{PREFIX}embed_tokens.base_layer.weight"}


@pytest.mark.parametrize("task_type", ["FEATURE_EXTRACTION", None])
def test_packs_dora_for_the_model_without_its_head(
    task_type: str | None, save_adapter: SaveAdapter, tmp_path: Path
) -> None:
    model = make_llama()
    layout = layout_of(model, "bfloat16")
    targets = ["q_proj", "down_proj"]
    folder = save_adapter(model.model, task_type=task_type, r=5, target_modules=targets, use_dora=True)
    saved = load_file(str(folder / "adapter_model.safetensors"))
    magnitudes = unpacked_magnitudes(load_and_pack(folder, layout, tmp_path / "cache"), layout)
    assert magnitudes.keys() == {f"model.{name}" for name in built_by_peft(model.model)}
    for name, (magnitude, behind) in magnitudes.items():
        assert torch.equal(magnitude, saved[f"{PREFIX}{name.removeprefix('model.')}.lora_magnitude_vector"])
        assert not behind.any()


@pytest.mark.parametrize("use_dora", [False, True])
def test_packs_adapters_of_models_with_fused_projections(
    use_dora: bool, save_adapter: SaveAdapter, tmp_path: Path
) -> None:
    model = make_phi3()
    layout = layout_of(model)
    fields = {"target_modules": ["qkv_proj", "gate_up_proj"], "use_rslora": True, "use_dora": use_dora}
    folder = save_adapter(model, r=3, lora_alpha=6, **fields)
    assert_holds_what_peft_saved(folder, layout, tmp_path / "cache", scaling=6 / 3**0.5)
    assert read_adapter(folder, layout).config.use_rslora


@pytest.mark.parametrize("layout_dtype", ["float32", "bfloat16"])
def test_packs_dora_with_ranks_and_alphas_from_patterns(
    layout_dtype: str, save_adapter: SaveAdapter, tmp_path: Path
) -> None:
    model = make_phi3()
    layout = layout_of(model, layout_dtype)
    folder = save_adapter(
        model,
        r=3,
        lora_alpha=6,
        target_modules=["qkv_proj", "o_proj", "gate_up_proj"],
        rank_pattern={"gate_up_proj": 1, r"layers\.1\..*qkv_proj": 9},
        alpha_pattern={"gate_up_proj": 2, r"layers\.1\..*qkv_proj": 18},
        use_dora=True,
    )
    assert {rank for rank, _ in built_by_peft(model).values()} == {1, 3, 9}
    assert_holds_what_peft_saved(folder, layout, tmp_path / "cache", scaling=2.0)


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout_dtype", ["float32", "bfloat16"])
def test_accepts_an_lm_head_adapter_with_the_base_weight_that_peft_saves_beside_it(
    tied: bool, layout_dtype: str, use_dora: bool, save_adapter: SaveAdapter, tmp_path: Path
) -> None:
    model = make_llama(tied)
    layout = layout_of(model, layout_dtype)
    folder = save_adapter(model, r=4, lora_alpha=4, target_modules=["lm_head", "q_proj"], use_dora=use_dora)
    assert f"{PREFIX}lm_head.base_layer.weight" in load_file(str(folder / "adapter_model.safetensors"))
    assert_holds_what_peft_saved(folder, layout, tmp_path / "cache", scaling=1.0)


def test_refuses_an_lm_head_adapter_of_another_base(save_adapter: SaveAdapter) -> None:
    model = make_llama()
    layout = layout_of(model)
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    with pytest.raises(AdapterError, match=r"lm_head\.base_layer\.weight") as refused:
        read_adapter(save_adapter(model, r=4, target_modules=["lm_head"]), layout)
    assert refused.value.code == "base_weight_differs"


@pytest.mark.parametrize("use_dora", [False, True])
def test_an_lm_head_bias_saved_with_its_adapter_is_accepted_only_if_it_is_the_served_one(
    use_dora: bool, save_adapter: SaveAdapter, tmp_path: Path
) -> None:
    folder = save_adapter(make_phi(), r=4, lora_alpha=4, target_modules=["lm_head", "q_proj"], use_dora=use_dora)
    assert f"{PREFIX}lm_head.base_layer.bias" in load_file(str(folder / "adapter_model.safetensors"))
    model = make_phi()
    assert_holds_what_peft_saved(folder, layout_of(model), tmp_path / "cache", scaling=1.0)
    with torch.no_grad():
        model.lm_head.bias[0] += 1
    with pytest.raises(AdapterError, match=r"lm_head\.base_layer\.bias") as refused:
        read_adapter(folder, layout_of(model))
    assert refused.value.code == "base_weight_differs"


@pytest.mark.parametrize("tied", [False, True])
def test_accepts_saved_embeddings_only_if_they_are_the_served_ones(tied: bool, save_adapter: SaveAdapter) -> None:
    folder = save_adapter(make_llama(tied), r=4, target_modules=["q_proj"], save={"save_embedding_layers": True})
    saved = load_file(str(folder / "adapter_model.safetensors"))
    assert saved.keys() & {f"{PREFIX}model.embed_tokens.weight", f"{PREFIX}lm_head.weight"}
    model = make_llama(tied)
    read_adapter(folder, layout_of(model))
    with torch.no_grad():
        model.model.embed_tokens.weight[0, 0] += 1
    with pytest.raises(AdapterError, match="differs from the served") as refused:
        read_adapter(folder, layout_of(model))
    assert refused.value.code == "base_weight_differs"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout_dtype", ["float32", "bfloat16"])
def test_accepts_lora_on_the_embedding_with_the_table_that_peft_saves_beside_it(
    tied: bool, layout_dtype: str, save_adapter: SaveAdapter, tmp_path: Path
) -> None:
    model = make_llama(tied)
    layout = layout_of(model, layout_dtype)
    targets = ["embed_tokens", "q_proj", "lm_head"]
    folder = save_adapter(
        model,
        r=5,
        lora_alpha=10,
        target_modules=targets,
        rank_pattern={"embed_tokens": 3},
        alpha_pattern={"embed_tokens": 9},
    )
    saved = load_file(str(folder / "adapter_model.safetensors"))
    assert f"{PREFIX}model.embed_tokens.base_layer.weight" in saved
    modules = unpacked(load_and_pack(folder, layout, tmp_path / "cache"), layout)
    built = built_by_peft(model)
    assert {name: scaling for name, (_, _, scaling) in modules.items()} == {
        name: scaling for name, (_, scaling) in built.items()
    }
    a, b, _ = modules["model.embed_tokens"]
    dtype = getattr(torch, layout_dtype)
    assert torch.equal(a, saved[f"{PREFIX}model.embed_tokens.lora_embedding_A"].to(dtype))
    assert torch.equal(b, saved[f"{PREFIX}model.embed_tokens.lora_embedding_B"].to(dtype))


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"init_lora_weights": "pissa"}, "unsupported_option"),
        ({"init_lora_weights": "olora"}, "unsupported_option"),
        ({"modules_to_save": ["norm"]}, "unsupported_option"),
    ],
)
def test_refuses_unsupported_variants_as_peft_saves_them(
    fields: dict[str, Any], code: str, save_adapter: SaveAdapter
) -> None:
    model = make_llama()
    layout = layout_of(model)
    with pytest.raises(AdapterError) as refused:
        read_adapter(save_adapter(model, r=4, target_modules=["q_proj"], **fields), layout)
    assert (refused.value.code, refused.value.key) == (code, next(iter(fields)))


@pytest.mark.parametrize("has_biases", [False, True])
def test_refuses_biases_as_peft_saves_them(has_biases: bool, save_adapter: SaveAdapter) -> None:
    model = make_phi() if has_biases else make_llama()
    layout = layout_of(model)
    folder = save_adapter(model, r=4, target_modules=["q_proj"], bias="all")
    if not has_biases:
        assert read_adapter(folder, layout).modules
        return
    with pytest.raises(AdapterError, match="adapters that train biases are not supported") as refused:
        read_adapter(folder, layout)
    assert refused.value.code == "unexpected_tensor"


def test_refuses_dora_on_the_embedding_although_peft_saves_it(save_adapter: SaveAdapter) -> None:
    model = make_llama()
    layout = layout_of(model)
    folder = save_adapter(model, r=4, target_modules=["embed_tokens", "q_proj"], use_dora=True)
    saved = load_file(str(folder / "adapter_model.safetensors"))
    assert f"{PREFIX}model.embed_tokens.lora_magnitude_vector" in saved
    with pytest.raises(AdapterError) as refused:
        read_adapter(folder, layout)
    assert (refused.value.code, refused.value.key) == ("unsupported_option", "use_dora")


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_bias": True},
        {"alora_invocation_tokens": [5], "task_type": "CAUSAL_LM"},
        {"target_parameters": ["v_proj.weight"]},
    ],
)
def test_options_that_are_refused_with_dora_are_refused_by_peft_too(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="use_dora"):
        get_peft_model(make_llama(), LoraConfig(target_modules=["q_proj"], use_dora=True, **fields))
    with pytest.raises(AdapterError) as refused:
        parse_config(json.dumps(config_of(use_dora=True, **fields)).encode())
    assert (refused.value.code, refused.value.key) == ("invalid_field", "use_dora")


def test_dora_weights_that_peft_saves_in_two_dtypes_are_already_clean(
    save_adapter: SaveAdapter, tmp_path: Path
) -> None:
    """All magnitudes then precede A and B in the file."""
    model = make_llama()
    layout = layout_of(model, "bfloat16")
    path = save_adapter(model, r=4, lora_alpha=4, target_modules=["q_proj"], use_dora=True) / WEIGHTS_NAME
    tensors = {
        name: tensor if name.endswith("magnitude_vector") else tensor.bfloat16()
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, {"format": "pt"})
    assert_holds_what_peft_saved(path.parent, layout, tmp_path / "cache", scaling=1.0)
    data = path.read_bytes()
    entries = parse_header(data, len(data))
    assert [entry.dtype for entry in entries] == ["F32"] * 2 + ["BF16"] * 4
    assert has_clean_weights(data[: entries[0].start], entries)


@pytest.mark.parametrize(("field", "in_key"), [("use_dora", "magnitude"), ("lora_bias", "bias")])
def test_refuses_tensors_of_variants_that_the_config_hides(field: str, in_key: str, save_adapter: SaveAdapter) -> None:
    model = make_llama()
    layout = layout_of(model)
    folder = edit_config(save_adapter(model, r=4, target_modules=["q_proj"], **{field: True}), **{field: False})
    with pytest.raises(AdapterError) as refused:
        read_adapter(folder, layout)
    assert refused.value.code == "unexpected_tensor"
    assert in_key in (refused.value.key or "")


@pytest.mark.parametrize("init", [False, "gaussian", "orthogonal", "mica"])
def test_inits_that_we_accept_leave_the_base_weights_unchanged(init: object, save_adapter: SaveAdapter) -> None:
    model = make_llama()
    layout = layout_of(model)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    folder = save_adapter(model, r=4, target_modules=["q_proj"], init_lora_weights=init)
    read_adapter(folder, layout)
    after = {name.replace(".base_layer", ""): weight for name, weight in model.state_dict().items()}
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


NAMES = [
    "q_proj",
    "v_proj",
    "down_proj",
    "lm_head",
    "self_attn.k_proj",
    "0.mlp.up_proj",
    "proj",
    "layers.1.mlp.up_proj",
]
NAMES += ["model.layers.1.self_attn.o_proj", "model.layers.0.self_attn.q_proj", "layers.0.self_attn.q_proj", "W_pack"]
PATTERNS = [
    r".*_proj",
    r".*\.(q|v)_proj",
    r"model\.layers\.\d\.mlp\.(up|gate)_proj",
    r"layers\.[01]\..*_proj",
    r".*layers\.1\..*_proj",
    r"(?!.*mlp).*proj",
    r".*(lm_head|k_proj)",
    r"q_proj",
    "all-linear",
    "ALL-linear",
]
KEYS = [
    "q_proj",
    r"layers\.1\.mlp\.up_proj",
    "layers.0.self_attn.q_proj",
    r"model\.layers\.[01]\.self_attn\.v_proj",
    r"(k|v)_proj",
    r"^model.layers.0.mlp.*",
    r"mlp\.\w+",
    "proj",
    "lm_head",
    "up.proj",
    "model|q_proj",
    "self_attn.k_proj|mlp.down_proj",
    r"1\..*",
    "self_attn\0q_proj",
]
name_lists = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4)
peft_fields = st.fixed_dictionaries(
    {
        "r": st.integers(1, 6),
        "lora_alpha": st.sampled_from([1, 8, 16, 2.5]),
        "use_rslora": st.booleans(),
        "target_modules": name_lists | st.sampled_from(PATTERNS),
        "exclude_modules": st.none() | name_lists | st.sampled_from(PATTERNS[:6]),
        "layers_to_transform": st.none() | st.sampled_from([0, 1, [0], [0, 1], []]),
        "layers_pattern": st.none() | st.sampled_from(["layers", ["layers"], ["h", "layers"], "model.layers", []]),
        "rank_pattern": st.dictionaries(st.sampled_from(KEYS), st.integers(1, 9), max_size=3),
        "alpha_pattern": st.dictionaries(st.sampled_from(KEYS), st.sampled_from([1, 3, 0.5, 32]), max_size=3),
    }
)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return make_llama()


@pytest.fixture(scope="module")
def llama_layout(llama: PreTrainedModel) -> BaseLayout:
    return layout_of(llama)


@settings(max_examples=120, deadline=None)
@given(fields=peft_fields)
def test_targets_ranks_and_scalings_agree_with_peft(
    llama: PreTrainedModel, llama_layout: BaseLayout, fields: dict[str, Any]
) -> None:
    assert_targets_as_peft(llama, llama_layout, fields)


@settings(max_examples=120, deadline=None)
@given(fields=peft_fields)
def test_targets_without_the_head_agree_with_peft_on_automodel(
    llama: PreTrainedModel, llama_layout: BaseLayout, fields: dict[str, Any]
) -> None:
    body = llama.base_model
    assert isinstance(body, LlamaModel)
    assert_targets_as_peft(body, without_head(llama_layout), {"task_type": "FEATURE_EXTRACTION", **fields})


def assert_targets_as_peft(model: PreTrainedModel, layout: BaseLayout, fields: dict[str, Any]) -> None:
    found, error = found_by_us(fields, layout)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = built_by_peft(get_peft_model(copy.deepcopy(model), LoraConfig(**copy.deepcopy(fields))))
        except ValueError:
            assert error is not None
            return
    if error is not None:
        # Stricter than PEFT in one respect: an entry or layer number that matches nothing is refused.
        assert (error.code, error.key) in STRICTER, error.message
        return
    assert found == expected


STRICTER = [("unknown_module", "target_modules"), ("unknown_module", "layers_to_transform")]


def found_by_us(fields: dict[str, Any], layout: BaseLayout) -> tuple[dict[str, tuple[int, float]], AdapterError | None]:
    try:
        targets = resolve_targets(parse_config(json.dumps(config_of(**fields)).encode()), layout).targets
    except AdapterError as error:
        return {}, error
    return {target.module.name: (target.lora_rank, target.scaling) for target in targets}, None
