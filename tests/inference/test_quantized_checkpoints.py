"""Checkpoints whose weights are stored in fewer bits: the model that is served is the one they stand for, or none."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loraserve_kernels.choose_backend import choose_backend
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

Saved = tuple[Path, PreTrainedModel]


@pytest.fixture(scope="module", params=sorted(SAVES))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The folder with "model" in it, and the model that it stands for."""
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


def test_its_weights_are_those_that_it_stands_for(saved: Saved) -> None:
    folder, expected = saved
    found = load(folder / "model")
    for (name, weight), (_, wanted) in zip(found.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(weight, wanted), name


def test_answers_are_those_of_the_whole_model(saved: Saved) -> None:
    folder, expected = saved
    oracle = oracle_of_saved(expected, folder)
    engine, wrong = run_all(oracle)
    assert not wrong
    is_kept = "mxfp4" in folder.name and has_c_kernels()
    note = "its experts stay as they are stored, in four bits" if is_kept else "its weights are made whole, in float32"
    assert any(note in other for other in engine.describe().notes)


def test_a_checkpoint_that_has_lost_a_part_of_a_weight_is_refused(saved: Saved, folder: Path) -> None:
    """transformers would take float8 without its scales for the weights."""
    whole = read_weights(folder)
    parts = [name for name in quantized_names(whole) if ".layers.1." in name and "scale" in name]
    for name in parts[:3]:
        write_weights(folder, {other: tensor for other, tensor in whole.items() if other != name})
        with pytest.raises(ModelRefusedError, match=f"cannot be made whole: it lacks {name}$"):
            load(folder)


def test_a_checkpoint_without_any_scales_is_refused(saved: Saved, folder: Path) -> None:
    write_weights(folder, {name: tensor for name, tensor in read_weights(folder).items() if "scale" not in name})
    with pytest.raises(ModelRefusedError, match=r"cannot be made whole: it lacks model\.layers\.\d\..*scale"):
        load(folder)


def test_what_transformers_does_not_read_of_a_weight_is_refused(tmp_path: Path) -> None:
    """As scales that go by another name."""
    save_fp8(tmp_path)
    tensors = read_weights(tmp_path)
    write_weights(tmp_path, {name.replace("scale_inv", "scales"): tensor for name, tensor in tensors.items()})
    with pytest.raises(ModelRefusedError, match=r"transformers does not read model\..*weight_scales"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("stated", "reason"),
    [
        ({"quant_method": "awq"}, "is quantized with awq, which is not supported: mxfp4, fp8, compressed-tensors are"),
        ({"config_groups": {"a": {}, "b": {}}}, r"transformers does not undo its 2 schemes \(a, b\)"),
        ({"transform_config": {"config_groups": {}}}, "does not undo its transform_config"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, r"its sparsity_config \(sparse-24-bitmask\)"),
    ],
)
def test_what_is_not_undone_is_refused_by_name(tmp_path: Path, stated: dict[str, object], reason: str) -> None:
    save_fp8(tmp_path)
    state(tmp_path, stated)
    with pytest.raises(ModelRefusedError, match=reason):
        loader.load_config(str(tmp_path), None)


def test_without_the_packages_the_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_fp8(tmp_path)
    monkeypatch.setattr(quantized_checkpoint, "find_spec", lambda _: None)
    with pytest.raises(ModelRefusedError, match=r"needs accelerate: pip install 'loraserve\[quantized\]'"):
        loader.load_config(str(tmp_path), None)


def test_a_model_that_is_too_large_once_it_is_whole_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_fp8(tmp_path)
    monkeypatch.setattr(startup, "available_memory_bytes", lambda: 1 << 20)
    with pytest.raises(EngineStartError, match=r"its weights in float32 take 0\.0 GiB, and 0\.0 GiB of"):
        make_engine(tmp_path)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    save_fp8(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no safetensors")
    with pytest.raises(ModelRefusedError, match=f"cannot read the weights of {tmp_path}"):
        load(tmp_path)


# What gpt-oss is published in is kept on CPUs.


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp("gpt_oss")
    return oracle_of_saved(save_mxfp4(folder / "model"), folder)


@pytest.mark.parametrize("quantization", ["none", *ROUNDINGS])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_experts_in_mxfp4_are_rounded_no_further(gpt_oss: Oracle, quantization: str, backend: str) -> None:
    """Whatever the other weights are rounded to, and with what their products are computed."""
    expected = load(gpt_oss.model)
    experts = {name: weight.clone() for name, weight in expected.named_parameters() if ".experts." in name}
    if quantization != "none":
        round_weights(expected, Quantization(quantization), experts_are_mxfp4=True)
    assert all(torch.equal(expected.get_parameter(name), weight) for name, weight in experts.items())
    references = reference_answers(expected, gpt_oss.adapters, gpt_oss.prompts, NUM_TOKENS, VOCAB_SIZE)
    settings = {"quantization": quantization, "backend": backend}
    of_rounded = replace(gpt_oss, references=references, settings=settings, packed=f"packed-{quantization}-{backend}")
    _, wrong = run_all(of_rounded)
    assert not wrong


def test_its_memory_is_counted_as_it_will_be(gpt_oss: Oracle) -> None:
    """A proof makes the experts of one layer whole at a time."""
    made: list[tuple[torch.Size, int]] = []

    class CountingBackend(ReferenceBackend):
        def whole_mxfp4(self, blocks: Tensor, scales: Tensor, out: Tensor) -> Tensor:
            made.append((out.shape, out.data_ptr()))
            return super().whole_mxfp4(blocks, scales, out)

    config = loader.load_config(str(gpt_oss.model), None)
    loaded = loader.load_model(str(gpt_oss.model), None, config, torch.float32, keeps_mxfp4=True)
    model = CausalModel(loaded.model, CountingBackend(), stored=loaded.stored)
    whole = load(gpt_oss.model)
    experts = [weight for name, weight in whole.named_parameters() if ".experts." in name and weight.dim() == 3]
    saved = sum(weight.nbytes - weight.numel() // 32 * 18 for weight in experts)
    assert model.weight_bytes == sum(weight.nbytes for weight in whole.parameters()) - saved
    made.clear()
    model.prepare(128, 260, lambda *_: None)
    num_packed = len(experts)
    in_proof = made[:-num_packed]
    assert len(in_proof) > 3 * num_packed
    assert len(set(in_proof)) == len({weight.shape for weight in experts})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda blocks, scales: (blocks[..., :15], scales), r"down_proj is \[4, 64, 3, 15\] and \[4, 64, 3\]"),
        (lambda blocks, scales: (blocks, scales[..., :2]), r"down_proj is \[4, 64, 3, 16\] and \[4, 64, 2\]"),
        (lambda blocks, scales: (blocks.char(), scales), r"down_proj is torch\.int8 and torch\.uint8"),
        (lambda blocks, scales: (blocks, scales.fill_(255)), "down_proj has weights that are not finite"),
        (lambda blocks, scales: (blocks[:, :32], scales[:, :32]), "cannot load the weights"),
    ],
)
def test_experts_that_are_no_mxfp4_are_refused(
    tmp_path: Path, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], reason: str
) -> None:
    save_mxfp4(tmp_path)
    tensors, name = read_weights(tmp_path), "model.layers.1.mlp.experts.down_proj"
    tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = change(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
    write_weights(tmp_path, tensors)
    with pytest.raises(ModelRefusedError, match=reason):
        loader.load_model(str(tmp_path), None, loader.load_config(str(tmp_path), None), torch.float32, keeps_mxfp4=True)
