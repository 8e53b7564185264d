"""Checkpoints whose weights are stored in fewer bits: the model that is served is the one they stand for, or none."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from loraserve.engine import startup
from loraserve.engine.errors import EngineStartError
from loraserve.models import loader, quantized_checkpoint
from loraserve.models.errors import ModelRefusedError
from tests.support.engines import make_engine
from tests.support.peft_oracle import oracle_of_saved, run_all
from tests.support.quantized_checkpoints import SAVES, read_weights, save_fp8, state, write_weights

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


def quantized_names(tensors: dict[str, Tensor]) -> list[str]:
    return [name for name in tensors if not name.endswith(("activation_scale", "input_scale", "bias"))]


def test_its_weights_are_those_that_it_stands_for(saved: Saved) -> None:
    folder, expected = saved
    found = load(folder / "model")
    for (name, weight), (_, wanted) in zip(found.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(weight, wanted), name


def test_answers_are_those_of_the_whole_model(saved: Saved) -> None:
    folder, expected = saved
    engine, wrong = run_all(oracle_of_saved(expected, folder))
    assert not wrong
    assert any("made whole, in float32" in note for note in engine.describe().notes)


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
