import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from loraserve_adapters.base_layout import BaseLayout
from loraserve_adapters.checks import Check, Checks, CheckStatus
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.limits import AdapterLimits
from loraserve_adapters.source import check_adapter, read_adapter

from tests.unit.adapters.folders import (
    HIDDEN,
    TOWER_LINEARS,
    VOCABULARY,
    RawTensor,
    config_of,
    head_weight,
    lora_key,
    lora_tensors,
    magnitude_key,
    multimodal_layout,
    raw_tensor,
    tiny_layout,
    tower_tensors,
    values_of,
    with_embedding,
    with_magnitudes,
    write_folder,
)

LAYOUT = tiny_layout()
Q0 = "model.layers.0.self_attn.q_proj"
A0, B0 = lora_key(Q0, "A"), lora_key(Q0, "B")


def test_accounts_for_every_tensor_and_summarizes_the_adapter(tmp_path: Path) -> None:
    tensors = lora_tensors(LAYOUT, ["q_proj", "down_proj"], dtype="bfloat16")
    config = config_of(target_modules=["q_proj", "down_proj"], base_model_name_or_path="org/base", use_rslora=True)
    source = read_adapter(write_folder(tmp_path, config, tensors), LAYOUT)
    assert {entry.name for module in source.modules for entry in module.entries} == tensors.keys()
    assert [module.target.scaling for module in source.modules] == [4.0] * 4
    summary = source.summary
    assert (summary.lora_ranks, summary.target_modules) == ((4,), ("q_proj", "down_proj"))
    assert summary.num_parameters * 2 == sum(len(raw) for _, _, raw in tensors.values())
    assert summary.dtypes == ("bfloat16",)
    assert (source.config.use_rslora, source.config.base_model_name) == (True, "org/base")


def replaced(name: str, tensor: RawTensor) -> Callable[[dict[str, RawTensor]], None]:
    def change(tensors: dict[str, RawTensor]) -> None:
        tensors[name] = tensor

    return change


def renamed(old: str, new: str) -> Callable[[dict[str, RawTensor]], None]:
    def change(tensors: dict[str, RawTensor]) -> None:
        tensors[new] = tensors.pop(old)

    return change


def poisoned(name: str, value: float, dtype: str = "float32") -> Callable[[dict[str, RawTensor]], None]:
    def change(tensors: dict[str, RawTensor]) -> None:
        values = values_of(tensors[name]).copy()
        values[-1, -1] = value
        if dtype == "bfloat16":
            raw = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
            tensors[name] = ("BF16", values.shape, raw)
        else:
            tensors[name] = raw_tensor(values, dtype)

    return change


ZEROS = np.zeros((4, HIDDEN), np.float32)


@pytest.mark.parametrize(
    ("change", "code", "key", "text"),
    [
        (lambda tensors: tensors.pop(A0), "missing_tensor", A0, "missing"),
        (lambda tensors: tensors.pop(B0), "missing_tensor", B0, "missing"),
        (lambda tensors: tensors.clear(), "missing_tensor", A0, "missing"),
        (replaced(A0, raw_tensor(ZEROS[:3])), "rank_mismatch", A0, "found [3, 32], expected [4, 32]"),
        (replaced(B0, raw_tensor(ZEROS[:2].T)), "rank_mismatch", B0, "rank 4"),
        (replaced(A0, raw_tensor(ZEROS[:, :31])), "shape_mismatch", A0, "found [4, 31], expected [4, 32]"),
        (replaced(B0, raw_tensor(ZEROS)), "shape_mismatch", B0, "found [4, 32], expected [32, 4]"),
        (replaced(A0, raw_tensor(ZEROS.reshape(-1))), "shape_mismatch", A0, "[128]"),
        (replaced(A0, ("F32", [0, HIDDEN], b"")), "rank_mismatch", A0, "[0, 32]"),
        (replaced(A0, ("F64", [4, HIDDEN], bytes(1024))), "bad_dtype", A0, "found F64, expected F32, F16 or BF16"),
        (replaced(A0, ("I32", [4, HIDDEN], bytes(512))), "bad_dtype", A0, "I32"),
        (replaced(A0, ("F8_E4M3", [4, HIDDEN], bytes(128))), "bad_dtype", A0, "F8_E4M3"),
        (poisoned(A0, np.nan), "not_finite", A0, "NaN"),
        (poisoned(B0, np.inf), "not_finite", B0, "infinity"),
        (poisoned(B0, -np.inf, "float16"), "not_finite", B0, "infinity"),
        (poisoned(B0, np.nan, "bfloat16"), "not_finite", B0, "NaN"),
        (renamed(A0, A0.replace("q_proj", "k_proj")), "unexpected_tensor", None, "not targeted"),
        (renamed(A0, A0.replace("layers.0", "layers.9")), "unknown_module", None, "did you mean model.layers."),
        (renamed(A0, A0.replace("lora_A", "lora_A.default")), "unexpected_tensor", None, "without an adapter name"),
        (renamed(A0, A0.removeprefix("base_model.model.")), "unexpected_tensor", None, "base_model.model."),
        (renamed(A0, "base_model.model.model.norm.weight"), "unexpected_tensor", None, "neither a LoRA tensor"),
        (renamed(A0, f"base_model.model.{Q0}.weight"), "unexpected_tensor", None, "neither a LoRA tensor"),
        (renamed(A0, ""), "unexpected_tensor", None, "base_model.model."),
        (
            replaced(magnitude_key(Q0), ("F32", [32], bytes(128))),
            "unexpected_tensor",
            magnitude_key(Q0),
            "belongs to DoRA, though adapter_config.json does not set use_dora",
        ),
        (
            replaced(f"base_model.model.{Q0}.lora_B.bias", ("F32", [32], bytes(128))),
            "unexpected_tensor",
            None,
            "lora_bias",
        ),
        (
            replaced("base_model.model.model.embed_tokens.lora_embedding_A", raw_tensor(ZEROS)),
            "unsupported_module",
            None,
            "LoRA on this embedding",
        ),
    ],
)
def test_refuses_wrong_tensors_by_name(
    change: Callable[[dict[str, RawTensor]], None], code: str, key: str | None, text: str, tmp_path: Path
) -> None:
    tensors = lora_tensors(LAYOUT, ["q_proj"])
    change(tensors)
    with pytest.raises(AdapterError) as refused:
        read_adapter(write_folder(tmp_path, config_of(), tensors), LAYOUT)
    error = refused.value
    assert (error.code, error.file) == (code, "adapter_model.safetensors")
    assert text in error.message
    assert key is None or (error.key == key and key in error.message)


MAGNITUDE0 = magnitude_key(Q0)
ONES = np.ones(HIDDEN, np.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reads_and_counts_magnitudes_of_dora(dtype: str, tmp_path: Path) -> None:
    tensors = with_magnitudes(lora_tensors(LAYOUT, ["q_proj", "down_proj"], dtype="bfloat16"), dtype)
    config = config_of(target_modules=["q_proj", "down_proj"], use_dora=True)
    source = read_adapter(write_folder(tmp_path, config, tensors), LAYOUT)
    assert {entry.name for module in source.modules for entry in module.entries} == tensors.keys()
    assert all(part.magnitude is not None and part.bias is None for module in source.modules for part in module.parts)
    assert source.summary.num_parameters == sum(values_of(tensor).size for tensor in tensors.values())
    assert source.summary.dtypes == tuple(sorted({"bfloat16", dtype}))


@pytest.mark.parametrize(
    ("change", "code", "key", "text"),
    [
        (lambda tensors: tensors.pop(MAGNITUDE0), "missing_tensor", MAGNITUDE0, "missing, though"),
        (lambda tensors: tensors.pop(B0), "missing_tensor", B0, "missing, though"),
        (replaced(MAGNITUDE0, raw_tensor(ONES[:-1])), "shape_mismatch", MAGNITUDE0, "found [31], expected [32]"),
        (replaced(MAGNITUDE0, raw_tensor(np.append(ONES, ONES[:1]))), "shape_mismatch", MAGNITUDE0, "found [33]"),
        (replaced(MAGNITUDE0, raw_tensor(ONES[:, None])), "shape_mismatch", MAGNITUDE0, "found [32, 1], expected [32]"),
        (replaced(MAGNITUDE0, raw_tensor(ONES[None])), "shape_mismatch", MAGNITUDE0, "found [1, 32], expected [32]"),
        (replaced(MAGNITUDE0, ("F32", [], bytes(4))), "shape_mismatch", MAGNITUDE0, "found []"),
        (replaced(MAGNITUDE0, ("F64", [HIDDEN], bytes(256))), "bad_dtype", MAGNITUDE0, "found F64, expected F32"),
        (replaced(MAGNITUDE0, ("U8", [HIDDEN], bytes(32))), "bad_dtype", MAGNITUDE0, "U8"),
        (replaced(MAGNITUDE0, raw_tensor(ONES * np.nan)), "not_finite", MAGNITUDE0, "NaN"),
        (replaced(MAGNITUDE0, raw_tensor(ONES * -np.inf, "float16")), "not_finite", MAGNITUDE0, "infinity"),
        (replaced(MAGNITUDE0, raw_tensor(ONES * np.inf, "bfloat16")), "not_finite", MAGNITUDE0, "infinity"),
        (
            renamed(MAGNITUDE0, f"{MAGNITUDE0}.default"),
            "unexpected_tensor",
            f"{MAGNITUDE0}.default",
            "writes lora_A.weight and lora_B.weight and lora_magnitude_vector without an adapter name",
        ),
        (
            renamed(MAGNITUDE0, MAGNITUDE0.replace("q_proj", "k_proj")),
            "unexpected_tensor",
            MAGNITUDE0.replace("q_proj", "k_proj"),
            "its module is not targeted",
        ),
        (
            renamed(MAGNITUDE0, MAGNITUDE0.replace("layers.0", "layers.9")),
            "unknown_module",
            MAGNITUDE0.replace("layers.0", "layers.9"),
            "no such linear; did you mean model.layers.",
        ),
        (
            replaced(magnitude_key("model.norm"), raw_tensor(ONES)),
            "unknown_module",
            magnitude_key("model.norm"),
            "no such linear",
        ),
        (
            replaced(f"base_model.model.{Q0}.lora_B.bias", raw_tensor(ONES)),
            "unexpected_tensor",
            f"base_model.model.{Q0}.lora_B.bias",
            "does not set lora_bias",
        ),
    ],
)
def test_refuses_wrong_magnitudes_by_name(
    change: Callable[[dict[str, RawTensor]], None], code: str, key: str, text: str, tmp_path: Path
) -> None:
    tensors = with_magnitudes(lora_tensors(LAYOUT, ["q_proj"]))
    change(tensors)
    with pytest.raises(AdapterError) as refused:
        read_adapter(write_folder(tmp_path, config_of(use_dora=True), tensors), LAYOUT)
    error = refused.value
    assert (error.code, error.key, error.file) == (code, key, "adapter_model.safetensors")
    assert text in error.message


def test_a_magnitude_of_the_embedding_is_refused(tmp_path: Path) -> None:
    name = magnitude_key("model.embed_tokens")
    tensors = with_magnitudes(lora_tensors(LAYOUT, ["q_proj"])) | {name: raw_tensor(ONES)}
    with pytest.raises(AdapterError, match="expected lora_embedding_A or lora_embedding_B") as refused:
        read_adapter(write_folder(tmp_path, config_of(use_dora=True), tensors), with_embedding(LAYOUT))
    assert (refused.value.code, refused.value.key) == ("unexpected_tensor", name)


MULTIMODAL = multimodal_layout()
QUERIES_OF_TOWER = TOWER_LINEARS[::2]


def warnings_of(folder: Path) -> list[Check]:
    checks = Checks()
    assert check_adapter(folder, MULTIMODAL, checks) is not None, checks.listed()[0]
    return [check for check in checks.listed() if check.status is CheckStatus.WARN]


def test_tensors_of_linears_that_text_never_reaches_are_ignored_with_a_warning(tmp_path: Path) -> None:
    text = lora_tensors(MULTIMODAL, ["q_proj"])
    folder = write_folder(tmp_path / "all", config_of(), text | tower_tensors(QUERIES_OF_TOWER))
    source = read_adapter(folder, MULTIMODAL)
    assert {entry.name for module in source.modules for entry in module.entries} == text.keys()
    modules, tensors = warnings_of(folder)
    assert (modules.name, modules.code, modules.key) == ("config.targets", "unreached_modules", "target_modules")
    assert "3 linear layers that text never reaches are also targeted" in modules.message
    assert QUERIES_OF_TOWER[0] in modules.message
    assert "exclude_modules='.*vision_tower.*'" in (modules.remedy or "")
    assert (tensors.name, tensors.code) == ("weights.unused", "unused_tensors")
    assert "6 tensors are ignored" in tensors.message
    without = write_folder(tmp_path / "text", config_of(), text)
    assert read_adapter(without, MULTIMODAL).digest == source.digest
    assert [check.name for check in warnings_of(without)] == ["config.targets"]


def test_magnitudes_of_linears_that_text_never_reaches_are_ignored_too(tmp_path: Path) -> None:
    text = with_magnitudes(lora_tensors(MULTIMODAL, ["q_proj"]))
    tower = with_magnitudes(tower_tensors(QUERIES_OF_TOWER))
    folder = write_folder(tmp_path / "all", config_of(use_dora=True), text | tower)
    source = read_adapter(folder, MULTIMODAL)
    assert {entry.name for module in source.modules for entry in module.entries} == text.keys()
    assert "9 tensors are ignored" in warnings_of(folder)[1].message
    without = write_folder(tmp_path / "text", config_of(use_dora=True), text)
    assert read_adapter(without, MULTIMODAL).digest == source.digest
    hidden = write_folder(tmp_path / "hidden", config_of(), lora_tensors(MULTIMODAL, ["q_proj"]) | tower)
    with pytest.raises(AdapterError, match="does not set use_dora"):
        read_adapter(hidden, MULTIMODAL)


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        (lora_key(TOWER_LINEARS[1], "A"), "unexpected_tensor", "not targeted"),
        (lora_key("model.vision_tower.conv", "A"), "unknown_module", "no such linear"),
        (lora_key("model.projection", "A"), "unknown_module", "no such linear"),
        (f"base_model.model.{TOWER_LINEARS[0]}.weight", "unexpected_tensor", "neither a LoRA tensor"),
        (f"base_model.model.{TOWER_LINEARS[0]}.lora_B.bias", "unexpected_tensor", "lora_bias"),
        (magnitude_key(TOWER_LINEARS[0]), "unexpected_tensor", "DoRA"),
        (lora_key("model.language_model.layers.0.self_attn.v_proj", "A"), "unexpected_tensor", "not targeted"),
    ],
)
def test_other_tensors_are_not_ignored_beside_those_of_a_tower(name: str, code: str, text: str, tmp_path: Path) -> None:
    tensors = lora_tensors(MULTIMODAL, ["q_proj"]) | tower_tensors(QUERIES_OF_TOWER) | {name: raw_tensor(ZEROS)}
    with pytest.raises(AdapterError) as refused:
        read_adapter(write_folder(tmp_path, config_of(), tensors), MULTIMODAL)
    assert (refused.value.code, refused.value.key) == (code, name)
    assert text in refused.value.message


def test_a_missing_text_tensor_is_refused_beside_those_of_a_tower(tmp_path: Path) -> None:
    tensors = lora_tensors(MULTIMODAL, ["q_proj"]) | tower_tensors(QUERIES_OF_TOWER)
    missing = lora_key("model.language_model.layers.1.self_attn.q_proj", "B")
    del tensors[missing]
    with pytest.raises(AdapterError) as refused:
        read_adapter(write_folder(tmp_path, config_of(), tensors), MULTIMODAL)
    assert (refused.value.code, refused.value.key) == ("missing_tensor", missing)


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize(("trained_on", "served"), [(LAYOUT, MULTIMODAL), (MULTIMODAL, LAYOUT)])
def test_the_error_for_names_of_another_class_beside_the_served_ones_gives_those(
    trained_on: BaseLayout, served: BaseLayout, use_dora: bool, tmp_path: Path
) -> None:
    """For example, those of the text-only class when the multimodal class is served."""
    tensors = lora_tensors(trained_on, ["q_proj"]) | lora_tensors(served, ["k_proj"])
    tensors = with_magnitudes(tensors) if use_dora else tensors
    config = config_of(use_dora=use_dora, target_modules=["q_proj", "k_proj"])
    with pytest.raises(AdapterError) as refused:
        read_adapter(write_folder(tmp_path, config, tensors), served)
    error, name = refused.value, served.groups[0][0].name
    assert error.code == "unknown_module"
    assert f"the base model has no such linear; its own is called {name}" in error.message
    assert "another class of the model" in error.message
    prefixes = [layout.groups[0][0].name.removesuffix("layers.0.self_attn.q_proj") for layout in (trained_on, served)]
    assert f"base_model.model.{prefixes[0]} to base_model.model.{prefixes[1]}" in (error.remedy or "")


def test_a_linear_of_another_size_does_not_suggest_another_class(tmp_path: Path) -> None:
    tensors = tower_tensors(["model.vision_tower.layers.0.self_attn.q_proj"]) | lora_tensors(LAYOUT, ["q_proj"])
    checks = Checks()
    assert check_adapter(write_folder(tmp_path, config_of(), tensors), LAYOUT, checks) is None
    failures = [check for check in checks.listed() if check.status is CheckStatus.FAIL]
    assert len(failures) == 2
    assert all("no such linear; did you mean model.layers." in failure.message for failure in failures)


def test_refuses_an_invocation_with_tokens_outside_the_vocabulary(tmp_path: Path) -> None:
    layout, config = tiny_layout(), config_of(alora_invocation_tokens=[3, VOCABULARY, 4])
    folder = write_folder(tmp_path, config, lora_tensors(layout, ["q_proj"]))
    assert read_adapter(folder, layout).config.invocation_token_ids == (3, VOCABULARY, 4)  # vocabulary size unknown
    with pytest.raises(AdapterError, match=r"token id 64 is outside the vocabulary .* \(0 to 63\)") as refused:
        read_adapter(folder, replace(layout, vocab_size=VOCABULARY))
    assert (refused.value.code, refused.value.key) == ("invalid_field", "alora_invocation_tokens")
    assert read_adapter(folder, replace(layout, vocab_size=VOCABULARY + 1)).judged.modules


def test_refuses_a_rank_that_is_not_the_tensors_rank(tmp_path: Path) -> None:
    with pytest.raises(AdapterError) as refused:
        read_adapter(write_folder(tmp_path, config_of(r=8), lora_tensors(LAYOUT, ["q_proj"])), LAYOUT)
    assert refused.value.code == "rank_mismatch"
    assert "rank 8" in refused.value.message


def test_checks_rank_pattern_against_the_tensors(tmp_path: Path) -> None:
    tensors = lora_tensors(LAYOUT, ["q_proj"], rank=4) | lora_tensors(LAYOUT, ["k_proj"], rank=2)
    config = config_of(target_modules=["q_proj", "k_proj"], rank_pattern={"k_proj": 2})
    source = read_adapter(write_folder(tmp_path, config, tensors), LAYOUT)
    assert source.summary.lora_ranks == (2, 4)
    with pytest.raises(AdapterError, match="rank 3"):
        read_adapter(write_folder(tmp_path, {**config, "rank_pattern": {"k_proj": 3}}, tensors), LAYOUT)


@pytest.mark.parametrize("name", ["lm_head.base_layer.weight", "lm_head.weight"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_accepts_a_copy_of_the_served_lm_head_weight(name: str, dtype: str, tmp_path: Path) -> None:
    layout = tiny_layout(dtype)
    tensors = lora_tensors(layout, ["lm_head"]) | {f"base_model.model.{name}": raw_tensor(head_weight())}
    read_adapter(write_folder(tmp_path, config_of(target_modules=["lm_head"]), tensors), layout)


@pytest.mark.parametrize(
    "tensor",
    [
        raw_tensor(head_weight() + 1),
        raw_tensor(head_weight(), "bfloat16"),
        raw_tensor(np.full((VOCABULARY, HIDDEN), np.nan, np.float32)),
        raw_tensor(head_weight()[:-1]),
        raw_tensor(head_weight().T),
        raw_tensor(head_weight().reshape(-1)),
    ],
)
def test_refuses_an_lm_head_weight_that_is_not_the_served_one(tensor: RawTensor, tmp_path: Path) -> None:
    tensors = lora_tensors(LAYOUT, ["lm_head"]) | {"base_model.model.lm_head.base_layer.weight": tensor}
    with pytest.raises(AdapterError) as refused:
        read_adapter(write_folder(tmp_path, config_of(target_modules=["lm_head"]), tensors), LAYOUT)
    assert refused.value.code == "base_weight_differs"


def test_refuses_truncated_and_extended_files(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, config_of(), lora_tensors(LAYOUT, ["q_proj"]))
    path = folder / "adapter_model.safetensors"
    good = path.read_bytes()
    for size in [0, 4, 8, 100, len(good) // 2, len(good) - 1]:
        path.write_bytes(good[:size])
        with pytest.raises(AdapterError) as refused:
            read_adapter(folder, LAYOUT)
        assert refused.value.code == "bad_safetensors"
    path.write_bytes(good + b"x")
    with pytest.raises(AdapterError) as refused:
        read_adapter(folder, LAYOUT)
    assert refused.value.code == "bad_safetensors"


def test_needs_both_files(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "adapter", config_of(), lora_tensors(LAYOUT, ["q_proj"]))
    for name in ["adapter_config.json", "adapter_model.safetensors"]:
        copied = Path(shutil.copytree(folder, tmp_path / name))
        (copied / name).unlink()
        with pytest.raises(AdapterError, match=name) as refused:
            read_adapter(copied, LAYOUT)
        assert refused.value.code == "missing_file"


def test_reads_symlinked_files_only_if_the_caller_allows_it(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "blobs", config_of(), lora_tensors(LAYOUT, ["q_proj"]))
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in folder.iterdir():
        (snapshot / path.name).symlink_to(path)
    with pytest.raises(AdapterError, match="symbolic link"):
        read_adapter(snapshot, LAYOUT)
    linked = read_adapter(snapshot, LAYOUT, AdapterLimits(follow_symlinks=True))
    assert linked.digest == read_adapter(folder, LAYOUT).digest


def test_other_files_in_the_folder_are_ignored(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, config_of(), lora_tensors(LAYOUT, ["q_proj"]))
    (folder / "README.md").write_text("a card")
    (folder / "adapter_model.bin").write_bytes(b"a pickle")
    read_adapter(folder, LAYOUT)


EMBEDDING = "base_model.model.model.embed_tokens"


def of_embedding(rank: int = 4) -> dict[str, RawTensor]:
    """As PEFT initializes them: A is zero."""
    return {
        f"{EMBEDDING}.lora_embedding_A": raw_tensor(np.zeros((rank, VOCABULARY), np.float32)),
        f"{EMBEDDING}.lora_embedding_B": raw_tensor(np.ones((HIDDEN, rank), np.float32)),
    }


def test_the_tensors_of_an_embedding_are_accepted_with_a_copy_of_its_table(tmp_path: Path) -> None:
    tensors = of_embedding() | {f"{EMBEDDING}.base_layer.weight": raw_tensor(head_weight())}
    folder = write_folder(tmp_path, config_of(target_modules=["embed_tokens"]), tensors)
    checks = Checks()
    source = check_adapter(folder, with_embedding(LAYOUT), checks)
    assert source is not None
    assert [module.target.module.name for module in source.modules] == ["model.embed_tokens"]
    assert "targets in the base model: the embedding" in [check.message for check in checks.listed()]
    assert [check.code for check in checks.listed() if check.status is CheckStatus.WARN] == ["no_effect"]


@pytest.mark.parametrize(
    ("change", "targets", "code", "text"),
    [
        (
            renamed(f"{EMBEDDING}.lora_embedding_A", f"{EMBEDDING}.lora_A.weight"),
            "embed_tokens",
            "missing_tensor",
            "_A",
        ),
        (
            renamed(f"{EMBEDDING}.lora_embedding_A", f"{EMBEDDING}.lora_A.weight"),
            "embed_tokens",
            "unexpected_tensor",
            "found lora_A.weight, expected lora_embedding_A or lora_embedding_B",
        ),
        (renamed(f"{EMBEDDING}.lora_embedding_B", f"{Q0}.lora_embedding_B"), "embed_tokens", "missing_tensor", "_B"),
        (
            renamed(f"{EMBEDDING}.lora_embedding_B", f"{EMBEDDING}.lora_embedding_B.default"),
            "embed_tokens",
            "unexpected_tensor",
            "save_pretrained writes lora_embedding_A and lora_embedding_B without an adapter name",
        ),
        (
            renamed(f"{EMBEDDING}.lora_embedding_B", f"base_model.model.{Q0}.lora_embedding_B"),
            "embed_tokens",
            "unexpected_tensor",
            "found lora_embedding_B, expected lora_A.weight or lora_B.weight",
        ),
        (
            renamed(f"{EMBEDDING}.lora_embedding_A", "base_model.model.model.embeddings.lora_embedding_A"),
            "embed_tokens",
            "unknown_module",
            "the base model has no such embedding; did you mean model.embed_tokens?",
        ),
        (
            replaced(f"{EMBEDDING}.lora_embedding_A", raw_tensor(np.ones((VOCABULARY, 4), np.float32))),
            "embed_tokens",
            "shape_mismatch",
            f"[4, {VOCABULARY}]",
        ),
        (
            replaced(f"{EMBEDDING}.base_layer.weight", raw_tensor(head_weight().T)),
            "embed_tokens",
            "base_weight_differs",
            f"[{VOCABULARY}, {HIDDEN}]",
        ),
        (
            lambda tensors: tensors.update(lora_tensors(LAYOUT, ["q_proj"])),
            "q_proj",
            "unexpected_tensor",
            "not targeted",
        ),
    ],
)
def test_refuses_wrong_tensors_of_an_embedding(
    change: Callable[[dict[str, RawTensor]], None], targets: str, code: str, text: str, tmp_path: Path
) -> None:
    tensors = of_embedding()
    change(tensors)
    folder = write_folder(tmp_path, config_of(target_modules=[targets]), tensors)
    checks = Checks()
    check_adapter(folder, with_embedding(LAYOUT), checks)
    failures = [check for check in checks.listed() if check.status is CheckStatus.FAIL]
    assert any(check.code == code and text in check.message for check in failures), failures
