"""Quantized checkpoints: each is served as the model that it defines, or refused."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loraserve_kernels.choose_backend import choose_backend
from loraserve_kernels.four_bit_weight import FourBitWeight
from loraserve_kernels.quantization import ROUNDINGS, Quantization
from loraserve_kernels.reference_backend import ReferenceBackend
from torch import Tensor
from transformers import PreTrainedModel

from loraserve.engine import startup
from loraserve.engine.errors import EngineStartError
from loraserve.models import loader, quantized_checkpoint
from loraserve.models.causal_model import CausalModel
from loraserve.models.errors import ModelRefusedError
from loraserve.models.quantized_weights import round_weights
from tests.support.engines import make_engine
from tests.support.peft_oracle import NUM_TOKENS, VOCAB_SIZE, Oracle, oracle_of_saved, run_all
from tests.support.quantized_checkpoints import (
    SAVES,
    read_weights,
    save_fp8,
    save_mxfp4,
    state,
    write_weights,
)
from tests.support.tiny_adapters import reference_answers
from tests.support.tiny_models import multimodal_config, random_model, save_model, tiny_model

Saved = tuple[Path, PreTrainedModel]


@pytest.fixture(scope="module", params=sorted(SAVES))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The folder with "model" in it, and the dequantized model."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, SAVES[request.param](folder / "model")


@pytest.fixture
def folder(saved: Saved, tmp_path: Path) -> Path:
    """A copy of the checkpoint."""
    return Path(shutil.copytree(saved[0] / "model", tmp_path / "model"))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return loader.load_model(str(folder), None, loader.load_config(str(folder), None), dtype).model


def has_c_kernels() -> bool:
    return choose_backend("cpu")[0].packs(torch.float32)


def quantized_names(tensors: dict[str, Tensor]) -> list[str]:
    return [name for name in tensors if not name.endswith(("activation_scale", "input_scale", "bias"))]


def require_equal(found: PreTrainedModel, expected: PreTrainedModel) -> None:
    for (name, weight), (_, wanted) in zip(found.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(weight, wanted), name
        assert weight.dtype == torch.float32


def test_loaded_weights_equal_the_dequantized_checkpoint(saved: Saved) -> None:
    folder, expected = saved
    require_equal(load(folder / "model"), expected)


@pytest.mark.parametrize("saved", ["mxfp4", "fp8", "fp8-experts", "W8A8"], indirect=True)
def test_answers_equal_those_of_the_dequantized_model(saved: Saved) -> None:
    folder, expected = saved
    oracle = oracle_of_saved(expected, folder)
    engine, wrong = run_all(oracle)
    assert not wrong
    is_kept = "mxfp4" in folder.name and has_c_kernels()
    note = "its experts stay in four bits, as stored" if is_kept else "its weights are dequantized to float32"
    assert any(note in other for other in engine.describe().notes)


def test_a_checkpoint_that_lacks_a_scale_is_refused(saved: Saved, folder: Path) -> None:
    """transformers would use float8 without its scales as the weights."""
    whole = read_weights(folder)
    parts = [name for name in quantized_names(whole) if ".layers.1." in name and "scale" in name]
    for name in parts[:3]:
        write_weights(folder, {other: tensor for other, tensor in whole.items() if other != name})
        with pytest.raises(ModelRefusedError, match=f"cannot be (dequantized|read): it lacks {name}$"):
            load(folder)


def test_a_checkpoint_without_any_scales_is_refused(saved: Saved, folder: Path) -> None:
    write_weights(folder, {name: tensor for name, tensor in read_weights(folder).items() if "scale" not in name})
    with pytest.raises(ModelRefusedError, match=r"cannot be (dequantized|read): it lacks model\.layers\.\d\..*scale"):
        load(folder)


def test_a_checkpoint_with_scales_that_transformers_does_not_read_is_refused(tmp_path: Path) -> None:
    """Scales under another name."""
    save_fp8(tmp_path)
    tensors = read_weights(tmp_path)
    write_weights(tmp_path, {name.replace("scale_inv", "scales"): tensor for name, tensor in tensors.items()})
    with pytest.raises(ModelRefusedError, match=r"transformers does not read model\..*weight_scales"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("stated", "reason"),
    [
        (
            {"quant_method": "hqq"},
            r"is quantized with hqq, which is not supported \(supported: mxfp4, fp8, compressed-tensors, gptq",
        ),
        ({"config_groups": {"a": {}, "b": {}}}, r"transformers does not support its 2 schemes \(a, b\)"),
        ({"transform_config": {"config_groups": {}}}, "does not support its transform_config"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, r"its sparsity_config \(sparse-24-bitmask\)"),
    ],
)
def test_unsupported_quantization_options_are_refused_by_name(
    tmp_path: Path, stated: dict[str, object], reason: str
) -> None:
    save_fp8(tmp_path)
    state(tmp_path, stated)
    with pytest.raises(ModelRefusedError, match=reason):
        loader.load_config(str(tmp_path), None)


@pytest.mark.parametrize(
    ("stated", "reason"),
    [
        ([], "cannot read the config"),
        ({"quant_method": 5}, "is quantized with 5"),
        ({"quant_method": "fp8", "config_groups": 5}, r"does not support its config_groups \(5\)"),
        ({"quant_method": "fp8", "sparsity_config": "x"}, "does not support its sparsity_config"),
        ({"quant_method": "fp8", "modules_to_not_convert": 5}, "cannot"),
    ],
)
def test_a_quantization_config_with_wrong_types_is_refused(tmp_path: Path, stated: object, reason: str) -> None:
    save_fp8(tmp_path)
    config = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
    with pytest.raises(ModelRefusedError, match=reason):
        load(tmp_path)


def test_quantized_weights_without_a_quantization_config_are_refused(saved: Saved, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_bytes())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelRefusedError, match=r"but its config.json has no quantization_config|lack model\."):
        load(folder)


def test_a_quantization_config_only_for_the_text_model_is_refused(tmp_path: Path) -> None:
    save_model(random_model(multimodal_config()), tmp_path)
    config = json.loads((tmp_path / "config.json").read_bytes())
    config["text_config"]["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelRefusedError, match="has a quantization_config only for its text model"):
        load(tmp_path)


@pytest.mark.parametrize("size", [[48, 32], [32, 48]])
def test_blocks_that_do_not_divide_a_weight_are_refused(tmp_path: Path, size: list[int]) -> None:
    """transformers would divide a weight's elements evenly among its scales."""
    save_fp8(tmp_path)
    state(tmp_path, {"weight_block_size": size})
    with pytest.raises(
        ModelRefusedError, match=rf"in blocks of \[{size[0]}, {size[1]}\], but its scales have shape \["
    ):
        load(tmp_path)


def test_float8_scales_without_a_global_scale_are_refused(tmp_path: Path) -> None:
    SAVES["NVFP4A16"](tmp_path)
    tensors = read_weights(tmp_path)
    write_weights(tmp_path, {name: tensor for name, tensor in tensors.items() if "global_scale" not in name})
    with pytest.raises(ModelRefusedError, match=r"it lacks model\..*\.weight_global_scale"):
        load(tmp_path)


def test_experts_in_unsupported_compressed_tensors_formats_are_refused(tmp_path: Path) -> None:
    """The scales of some formats would be ignored."""
    save_model(tiny_model("mixtral"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_bytes())
    stated = {"quant_method": "compressed-tensors", "config_groups": {}}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
    with pytest.raises(
        ModelRefusedError, match="mixture-of-experts models in compressed-tensors are supported only in"
    ):
        load(tmp_path)


@pytest.mark.parametrize("index", ["[]", "5", '{"weight_map": []}', "no json"])
def test_an_unreadable_index_is_named(tmp_path: Path, index: str) -> None:
    save_fp8(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelRefusedError, match=r"cannot read .*model\.safetensors\.index\.json"):
        load(tmp_path)


def test_a_missing_shard_is_named_and_the_index_is_ignored_if_there_is_a_single_file(tmp_path: Path) -> None:
    expected = save_fp8(tmp_path)
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-1-of-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    require_equal(load(tmp_path), expected)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelRefusedError, match=r"lacks model-1-of-2\.safetensors, which its index names"):
        load(tmp_path)


def test_sharded_checkpoints_are_loaded(tmp_path: Path) -> None:
    expected = save_mxfp4(tmp_path / "model")
    tensors = read_weights(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    places = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(sorted(tensors))}
    for place in {*places.values()}:
        write_weights(tmp_path / "model", {name: tensors[name] for name in tensors if places[name] == place}, place)
    index = {"metadata": {}, "weight_map": places}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    require_equal(load(tmp_path / "model"), expected)
    _, wrong = run_all(oracle_of_saved(expected, tmp_path))
    assert not wrong


def test_missing_packages_are_reported_with_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_fp8(tmp_path)
    monkeypatch.setattr(quantized_checkpoint, "find_spec", lambda _: None)
    with pytest.raises(ModelRefusedError, match=r"needs accelerate: pip install 'loraserve\[quantized\]'"):
        loader.load_config(str(tmp_path), None)


def test_a_model_that_is_too_large_once_dequantized_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_fp8(tmp_path)
    monkeypatch.setattr(startup, "available_memory_bytes", lambda: 1 << 20)
    with pytest.raises(EngineStartError, match=r"its weights in float32 take 0\.0 GiB, but only 0\.0 GiB of"):
        make_engine(tmp_path)


def test_unreadable_weights_are_reported_with_their_folder(tmp_path: Path) -> None:
    save_fp8(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no safetensors")
    with pytest.raises(ModelRefusedError, match=f"cannot read the weights of {tmp_path}"):
        load(tmp_path)


# MXFP4, the format in which gpt-oss is published, is kept on CPUs.


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp("gpt_oss")
    return oracle_of_saved(save_mxfp4(folder / "model"), folder)


@pytest.mark.parametrize(
    ("quantization", "backend"), [("none", "reference"), *((each, "auto") for each in ROUNDINGS), ("int4", "reference")]
)
def test_experts_in_mxfp4_are_not_rounded_again(gpt_oss: Oracle, quantization: str, backend: str) -> None:
    """Whatever the other weights are rounded to, and whichever backend multiplies."""
    expected = load(gpt_oss.model)
    experts = {name: weight.clone() for name, weight in expected.named_parameters() if ".experts." in name}
    if quantization != "none":
        stored = loader.stored_weights(
            str(gpt_oss.model), None, loader.load_config(str(gpt_oss.model), None), torch.float32
        )
        round_weights(expected, Quantization(quantization), stored)
    assert all(torch.equal(expected.get_parameter(name), weight) for name, weight in experts.items())
    references = reference_answers(expected, gpt_oss.adapters, gpt_oss.prompts, NUM_TOKENS, VOCAB_SIZE)
    settings = {"quantization": quantization, "backend": backend}
    of_rounded = replace(gpt_oss, references=references, settings=settings, packed=f"packed-{quantization}-{backend}")
    _, wrong = run_all(of_rounded)
    assert not wrong


def test_weight_bytes_counts_mxfp4_experts_at_their_stored_size(gpt_oss: Oracle) -> None:
    """The load-time check dequantizes the experts of one layer at a time."""
    made: list[tuple[torch.Size, int]] = []

    class CountingBackend(ReferenceBackend):
        def dequantize_weight(self, weight: FourBitWeight, out: Tensor) -> Tensor:
            made.append((out.shape, out.data_ptr()))
            return super().dequantize_weight(weight, out)

    config = loader.load_config(str(gpt_oss.model), None)
    stored = loader.stored_weights(str(gpt_oss.model), None, config, torch.float32)
    loaded = loader.load_model(str(gpt_oss.model), None, config, torch.float32, stored=stored)
    model = CausalModel(loaded.model, CountingBackend(), stored=stored)
    whole = load(gpt_oss.model)
    experts = [weight for name, weight in whole.named_parameters() if ".experts." in name and weight.dim() == 3]
    saved = sum(weight.nbytes - weight.numel() // 32 * 18 for weight in experts)
    assert model.weight_bytes == sum(weight.nbytes for weight in whole.parameters()) - saved
    made.clear()
    model.prepare(128, 260, lambda *_: None)
    num_experts = len(experts[0])
    assert len(made) > 3 * len(experts) * num_experts
    assert len(set(made)) == len({weight.shape for weight in experts}) * num_experts


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda blocks, scales: (blocks[..., :15], scales),
            r"down_proj has the shapes \[4, 64, 3, 15\] and \[4, 64, 3\]",
        ),
        (
            lambda blocks, scales: (blocks, scales[..., :2]),
            r"down_proj has the shapes \[4, 64, 3, 16\] and \[4, 64, 2\]",
        ),
        (lambda blocks, scales: (blocks.char(), scales), r"down_proj is torch\.int8 and torch\.uint8"),
        (lambda blocks, scales: (blocks, scales.fill_(255)), "down_proj has non-finite weights"),
        (
            lambda blocks, scales: (blocks[:, :32], scales[:, :32]),
            r"has shape \[4, 96, 32\] in .* \[4, 96, 64\] in the model",
        ),
    ],
)
def test_invalid_mxfp4_experts_are_refused(
    tmp_path: Path, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], reason: str
) -> None:
    save_mxfp4(tmp_path)
    tensors, name = read_weights(tmp_path), "model.layers.1.mlp.experts.down_proj"
    tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = change(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
    write_weights(tmp_path, tensors)
    with pytest.raises(ModelRefusedError, match=reason):
        loader.stored_weights(str(tmp_path), None, loader.load_config(str(tmp_path), None), torch.float32)


def test_experts_stored_in_full_precision_stay_in_full_precision(tmp_path: Path) -> None:
    """While other layers' are in MXFP4."""
    expected = save_mxfp4(tmp_path / "model")
    tensors = read_weights(tmp_path / "model")
    for name in ("gate_up_proj", "down_proj"):
        path = f"model.layers.0.mlp.experts.{name}"
        del tensors[f"{path}_blocks"], tensors[f"{path}_scales"]
        tensors[path] = torch.randn(expected.get_parameter(path).shape) * 0.2
        expected.get_parameter(path).data.copy_(tensors[path])
    write_weights(tmp_path / "model", tensors)
    _, wrong = run_all(oracle_of_saved(expected, tmp_path))
    assert not wrong


def test_a_layer_with_only_one_expert_projection_in_mxfp4_is_refused(tmp_path: Path) -> None:
    expected = save_mxfp4(tmp_path)
    tensors, path = read_weights(tmp_path), "model.layers.0.mlp.experts.down_proj"
    del tensors[f"{path}_blocks"], tensors[f"{path}_scales"]
    write_weights(tmp_path, tensors | {path: expected.get_parameter(path).data})
    with pytest.raises(EngineStartError, match=r"lacks model\.layers\.0\.mlp\.experts\.down_proj_"):
        make_engine(tmp_path)


def test_mxfp4_experts_that_cannot_be_computed_are_refused(gpt_oss: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_c_kernels():
        pytest.skip("needs our C kernels")
    monkeypatch.setattr("loraserve.models.structure.can_compute", lambda *_: False)
    with pytest.raises(EngineStartError, match="some of its experts cannot be computed in MXFP4"):
        make_engine(gpt_oss.model)
