"""GPTQ, AWQ and bitsandbytes checkpoints: each is served as the model that it defines, or refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from loraserve.models import loader
from loraserve.models.errors import ModelRefusedError
from tests.support.peft_oracle import oracle_of_saved, run_all
from tests.support.quantized_checkpoints import (
    UNPACKED_SAVES,
    read_weights,
    save_awq,
    save_floats,
    save_gptq,
    save_int8,
    save_integers,
    save_nf4,
    state,
    write_weights,
)
from tests.support.tiny_models import COMMON, random_model

Saved = tuple[Path, PreTrainedModel]
Tensors = dict[str, Tensor]
Q_PROJ = "model.layers.1.self_attn.q_proj"
NF4_STATE = f"{Q_PROJ}.weight.quant_state.bitsandbytes__nf4"


@pytest.fixture(scope="module", params=sorted(UNPACKED_SAVES))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The folder with "model" in it, and the dequantized model."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, UNPACKED_SAVES[request.param](folder / "model")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return loader.load_model(str(folder), None, loader.load_config(str(folder), None), dtype).model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_weights_equal_the_dequantized_checkpoint(saved: Saved, dtype: torch.dtype) -> None:
    folder, expected = saved
    found = load(folder / "model", dtype)
    for (name, weight), (_, wanted) in zip(found.named_parameters(), expected.named_parameters(), strict=True):
        assert weight.dtype == dtype
        assert torch.equal(weight, wanted.to(dtype)), name


@pytest.mark.parametrize("saved", ["integers-8", "gptq-8", "other-levels"], indirect=True)
def test_answers_equal_those_of_the_dequantized_model(saved: Saved) -> None:
    folder, expected = saved
    engine, wrong = run_all(oracle_of_saved(expected, folder))
    assert not wrong
    assert any("its weights are dequantized to float32" in note for note in engine.describe().notes)


def test_a_checkpoint_that_lacks_a_part_of_a_weight_is_refused(saved: Saved, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved[0] / "model", tmp_path / "model"))
    whole = read_weights(folder)
    parts = [name for name in whole if name.startswith(f"{Q_PROJ}.") and "weight_format" not in name]
    assert len(parts) >= 2
    for part in parts:
        write_weights(folder, {name: tensor for name, tensor in whole.items() if name != part})
        with pytest.raises(ModelRefusedError, match=rf"cannot be read: it lacks {Q_PROJ}\."):
            load(folder)


def test_sharded_checkpoints_are_loaded(tmp_path: Path) -> None:
    """Parts of one weight may be in different shards."""
    expected = save_nf4(tmp_path)
    tensors = read_weights(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    places = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(sorted(tensors))}
    for place in {*places.values()}:
        write_weights(tmp_path, {name: tensors[name] for name in tensors if places[name] == place}, place)
    index = {"metadata": {}, "weight_map": places}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = load(tmp_path)
    assert all(torch.equal(*pair) for pair in zip(found.parameters(), expected.parameters(), strict=True))


@pytest.mark.parametrize(
    ("save", "stated", "reason"),
    [
        (save_gptq, {"bits": 3}, r"its bits \(3\) is not supported"),
        (save_gptq, {"bits": None}, r"its bits \(None\)"),
        (save_gptq, {"checkpoint_format": "marlin"}, r"its format \(marlin\)"),
        (save_gptq, {"format": "gptq_v2"}, r"its format \(gptq, gptq_v2\)"),
        (save_gptq, {"is_marlin_format": True}, r"its format \(gptq, marlin\)"),
        (save_gptq, {"format": ["x"]}, r"its format \("),
        (save_awq, {"version": "GEMV"}, r"its version \(gemv\)"),
        (save_awq, {"backend": "llm-awq"}, r"its version \(gemm, llm-awq\)"),
        (save_awq, {"bits": 8}, r"its bits \(8\)"),
        (save_awq, {"zero_point": False}, r"its zero_point \(False\)"),
        (save_awq, {"group_size": "32"}, r"its group_size \('32'\) must be a positive number of inputs"),
        (save_gptq, {"group_size": 0}, r"its group_size \(0\) must be a positive number of inputs"),
        (save_int8, {"load_in_4bit": True}, r"its load_in_8bit \(True\)"),
        (save_int8, {"load_in_8bit": False}, r"its load_in_8bit \(False\)"),
    ],
)
def test_unsupported_options_are_refused_by_name(
    save: Callable[[Path], PreTrainedModel], stated: dict[str, object], reason: str, tmp_path: Path
) -> None:
    save(tmp_path)
    state(tmp_path, stated)
    with pytest.raises(ModelRefusedError, match=reason):
        loader.load_config(str(tmp_path), None)


def cut(name: str, *sizes: int) -> Callable[[Tensors], None]:
    """Keeps only the first `sizes[i]` entries of axis i."""

    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[name][tuple(slice(size) for size in sizes)]

    return change


def put(name: str, tensor: Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__setitem__(name, tensor)


def nf4_state(**changes: object) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        stated = json.loads(bytes(tensors[NF4_STATE].tolist())) | changes
        tensors[NF4_STATE] = torch.tensor([*json.dumps(stated).encode()], dtype=torch.uint8)

    return change


@pytest.mark.parametrize(
    ("save", "change", "reason"),
    [
        (save_gptq, cut(f"{Q_PROJ}.scales", 3), r"q_proj\.scales is \[3, 128\], expected \[4, 128\]"),
        (save_gptq, cut(f"{Q_PROJ}.qzeros", 4, 8), r"q_proj\.qzeros is \[4, 8\], expected \[4, 16\]"),
        (save_gptq, put(f"{Q_PROJ}.qweight", torch.zeros(16, 128)), r"qweight is torch\.float32"),
        (save_gptq, put(f"{Q_PROJ}.qzeros", torch.full((4, 16), -1, dtype=torch.int32)), "has zero points of 0"),
        (save_gptq, put(f"{Q_PROJ}.g_idx", torch.full((128,), 4, dtype=torch.int32)), "g_idx refers to groups"),
        (save_awq, cut(f"{Q_PROJ}.scales", 4, 64), r"q_proj\.scales is \[4, 64\], expected \[4, 128\]"),
        (save_nf4, cut(f"{Q_PROJ}.weight", 100), r"q_proj\.weight has 100 bytes, expected 8192 for \[128, 128\]"),
        (save_nf4, cut(f"{Q_PROJ}.weight.absmax", 200), r"weight\.absmax is \[200\], expected \[256\]"),
        (save_nf4, cut(f"{Q_PROJ}.weight.quant_map", 15), r"weight\.quant_map is \[15\], expected \[16\]"),
        (save_nf4, put(NF4_STATE, torch.zeros(4, dtype=torch.uint8)), "bitsandbytes__nf4 cannot be parsed"),
        (save_nf4, nf4_state(dtype="float8"), "bitsandbytes__nf4 cannot be parsed"),
        (save_nf4, nf4_state(blocksize=0), "bitsandbytes__nf4 cannot be parsed"),
        (save_nf4, nf4_state(shape=[128]), "bitsandbytes__nf4 cannot be parsed"),
        (save_nf4, nf4_state(nested_blocksize=0), "has nested_blocksize 0"),
        (save_floats, cut(f"{Q_PROJ}.weight_scale", 128, 3), r"weight_scale is \[128, 3\], expected \[128, 4\]"),
        (save_floats, cut(f"{Q_PROJ}.weight_packed", 128, 60), r"weight_packed is torch\.uint8 \[128, 60\], expected"),
        (save_floats, put(f"{Q_PROJ}.weight_scale", torch.ones(128, 4)), r"weight_scale is torch\.float32, expected"),
        (save_int8, put(f"{Q_PROJ}.weight_format", torch.tensor(1, dtype=torch.uint8)), "is 1, expected 0"),
        (save_int8, cut(f"{Q_PROJ}.SCB", 127), r"q_proj\.SCB is \[127\], expected \[128\]"),
        (save_int8, put(f"{Q_PROJ}.weight", torch.zeros(128, 128, dtype=torch.uint8)), r"weight is torch\.uint8"),
    ],
)
def test_tensors_with_a_wrong_shape_dtype_or_value_are_named(
    save: Callable[[Path], PreTrainedModel], change: Callable[[Tensors], None], reason: str, tmp_path: Path
) -> None:
    save(tmp_path)
    tensors = read_weights(tmp_path)
    change(tensors)
    write_weights(tmp_path, tensors)
    with pytest.raises(ModelRefusedError, match=reason):
        load(tmp_path)


@pytest.mark.parametrize(
    ("save", "changes"),
    [(save_gptq, {"group_size": 64}), (save_awq, {"group_size": 64}), (save_gptq, {"bits": 8})],
)
def test_shape_errors_state_the_bits_and_group_size_of_the_config(
    save: Callable[[Path], PreTrainedModel], changes: dict[str, object], tmp_path: Path
) -> None:
    save(tmp_path)
    state(tmp_path, changes)
    stated = {"bits": 4, "group_size": 32} | changes
    reason = f"for {stated['bits']} bits and a group_size of {stated['group_size']}, as in config.json$"
    with pytest.raises(ModelRefusedError, match=rf"scales is \[\d+, \d+\], expected \[\d+, \d+\] {reason}"):
        load(tmp_path)


@pytest.mark.parametrize(("save", "name"), [(save_gptq, "qweight"), (save_awq, "qweight"), (save_integers, "packed")])
def test_packed_weights_without_a_quantization_config_are_refused(
    save: Callable[[Path], PreTrainedModel], name: str, tmp_path: Path
) -> None:
    save(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_bytes())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    with pytest.raises(
        ModelRefusedError, match=rf"has model\..*{name}, but its config.json has no quantization_config"
    ):
        load(tmp_path)


def test_zero_points_of_a_linear_with_eight_outputs_are_read(tmp_path: Path) -> None:
    """They fill exactly one word."""
    model = random_model(LlamaConfig(**COMMON | {"num_key_value_heads": 1}, head_dim=8))
    expected, found = save_integers(tmp_path, model), load(tmp_path)
    for (name, weight), (_, wanted) in zip(found.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(weight, wanted), name


def test_mxfp4_scales_may_be_stored_as_float8_e8m0fnu(tmp_path: Path) -> None:
    expected = save_floats(tmp_path)
    tensors = read_weights(tmp_path)
    scales = {name: scale for name, scale in tensors.items() if name.endswith("weight_scale")}
    write_weights(tmp_path, tensors | {name: scale.view(torch.float8_e8m0fnu) for name, scale in scales.items()})
    for (name, weight), (_, wanted) in zip(load(tmp_path).named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(weight, wanted), name


def test_a_checkpoint_with_act_order_that_lacks_g_idx_is_refused(tmp_path: Path) -> None:
    save_gptq(tmp_path, in_order=False)
    tensors = read_weights(tmp_path)
    write_weights(tmp_path, {name: tensor for name, tensor in tensors.items() if not name.endswith("g_idx")})
    with pytest.raises(ModelRefusedError, match=r"it lacks model\..*\.g_idx"):
        load(tmp_path)
