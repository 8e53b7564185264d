"""Linears that stay in NF4 on CPUs, as bitsandbytes has them."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from loraserve_kernels.quantization import ROUNDINGS, Quantization
from loraserve_kernels.quantized_weight import rounded_weight
from loraserve_kernels.reference_backend import ReferenceBackend
from peft import LoraConfig
from torch import Tensor, nn
from transformers import PreTrainedModel

from loraserve.engine import startup
from loraserve.engine.errors import EngineStartError
from loraserve.models import loader
from loraserve.models.causal_model import CausalModel
from loraserve.models.errors import ModelRefusedError
from loraserve.models.quantized_weights import round_weights
from loraserve.models.stored_weights import StoredWeights
from tests.support.engines import make_engine
from tests.support.peft_oracle import NUM_TOKENS, VOCAB_SIZE, Oracle, oracle_of_saved, reference_answers, run_all
from tests.support.quantized_checkpoints import ANY_LEVELS, llama, mixtral, read_weights, save_nf4, write_weights
from tests.support.tiny_adapters import adapter_configs
from tests.support.tiny_models import multimodal_config, random_model

NF4 = Quantization.NF4
Q_PROJ = "model.layers.1.self_attn.q_proj"


def load(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, StoredWeights]:
    config = loader.load_config(str(folder), None)
    stored = loader.stored_weights(str(folder), None, config)
    return loader.load_model(str(folder), None, config, dtype, stored=stored).model, stored


def load_whole(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return loader.load_model(str(folder), None, loader.load_config(str(folder), None), dtype).model


def linears_of(model: PreTrainedModel) -> dict[str, Quantization]:
    names = [name for name, weight in model.named_parameters() if ".layers." in name and weight.dim() == 2]
    return dict.fromkeys(names, NF4)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp("nf4")
    return oracle_of_saved(save_nf4(folder / "model"), folder)


@pytest.mark.parametrize(
    ("quantization", "backend"),
    [("none", "auto"), *((each, "auto") for each in ROUNDINGS), ("int8", "reference")],
)
def test_answers_are_those_of_its_levels_as_ours(oracle: Oracle, quantization: str, backend: str) -> None:
    """Beside whatever the other weights are rounded to, and with whatever adapters."""
    expected = load_whole(oracle.model)
    round_weights(expected, None if quantization == "none" else Quantization(quantization), linears_of(expected))
    references = reference_answers(expected, oracle.adapters, oracle.prompts, NUM_TOKENS, VOCAB_SIZE)
    settings = {"quantization": quantization, "backend": backend}
    ours = replace(oracle, references=references, settings=settings, packed=f"packed-{quantization}-{backend}")
    engine, wrong = run_all(ours)
    assert not wrong
    assert "bitsandbytes checkpoint: its linears stay as they are stored, in four bits" in engine.describe().notes


def test_without_c_kernels_it_is_whole_unless_fewer_bits_are_asked_for(oracle: Oracle) -> None:
    engine, wrong = run_all(replace(oracle, settings={"backend": "reference"}, packed="packed-whole"))
    assert not wrong
    assert any("its weights are made whole, in float32" in note for note in engine.describe().notes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stated", ["bfloat16", "float16"])
@pytest.mark.parametrize("is_nested", [False, True], ids=["plain", "nested"])
def test_whole_it_is_what_it_stands_for(tmp_path: Path, dtype: torch.dtype, stated: str, is_nested: bool) -> None:
    save_nf4(tmp_path, is_nested=is_nested, dtype=stated, storage=torch.bfloat16 if is_nested else torch.uint8)
    whole, (model, stored) = load_whole(tmp_path, dtype), load(tmp_path, dtype)
    assert stored.keys() == linears_of(whole).keys()
    for name, weight in stored.items():
        placeholder, expected = model.get_parameter(name), whole.get_parameter(name)
        assert (placeholder.shape, placeholder.dtype) == (expected.shape, expected.dtype)
        assert placeholder.untyped_storage().nbytes() <= 4
        assert torch.equal(weight.whole(placeholder, ReferenceBackend()), expected), name
        rounded = rounded_weight(expected.detach(), NF4)
        assert torch.equal(weight.rounded(placeholder, ReferenceBackend()), rounded), name
        out = torch.empty_like(expected)
        assert weight.rounded(placeholder, ReferenceBackend(), out) is out
        assert torch.equal(out, rounded)


def test_its_memory_is_counted_as_it_will_be(oracle: Oracle) -> None:
    """A proof makes one linear whole at a time."""
    made: list[tuple[torch.Size, int]] = []

    class CountingBackend(ReferenceBackend):
        def whole_nf4(self, codes: Tensor, largest: Tensor, levels: Tensor, out: Tensor) -> Tensor:
            made.append((out.shape, out.data_ptr()))
            return super().whole_nf4(codes, largest, levels, out)

    loaded, stored = load(oracle.model, torch.bfloat16)
    model = CausalModel(loaded, CountingBackend(), stored=stored)
    whole = load_whole(oracle.model, torch.bfloat16)
    sizes = [whole.get_parameter(name).numel() for name in stored]
    saved = sum(2 * size - size // 32 * 18 for size in sizes)
    assert model.weight_bytes == sum(weight.nbytes for weight in whole.parameters()) - saved
    made.clear()
    model.prepare(128, 260, lambda *_: None)
    in_proof = made[: -len(sizes)]
    assert len(in_proof) > 2 * len(sizes)
    assert len(set(in_proof)) <= len({whole.get_parameter(name).shape for name in stored})


def _answers_of_whole(
    folder: Path,
    expected: PreTrainedModel,
    stored: dict[str, Quantization],
    configs: Callable[[PreTrainedModel], Mapping[str, LoraConfig]] = adapter_configs,
) -> None:
    round_weights(expected, None, stored)
    _, wrong = run_all(oracle_of_saved(expected, folder, configs))
    assert not wrong


def test_a_linear_beside_others_that_are_not_stored_so_is_whole(tmp_path: Path) -> None:
    """They are computed together."""
    expected = save_nf4(tmp_path / "model")
    folder = tmp_path / "model"
    tensors = {name: tensor for name, tensor in read_weights(folder).items() if not name.startswith(f"{Q_PROJ}.")}
    write_weights(folder, tensors | {f"{Q_PROJ}.weight": expected.get_parameter(f"{Q_PROJ}.weight").detach()})
    attention = Q_PROJ.removesuffix("q_proj")
    others = [f"{attention}{name}_proj.weight" for name in ("q", "k", "v")]
    _answers_of_whole(tmp_path, expected, {name: NF4 for name in linears_of(expected) if name not in others})


def test_of_experts_the_attention_stays_so(tmp_path: Path) -> None:
    """Those of bitsandbytes are linears, one for each, which transformers makes one weight of."""
    expected = save_nf4(tmp_path / "model", mixtral())
    _, stored = load(tmp_path / "model")
    assert {name.split(".")[4] for name in stored} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    _answers_of_whole(tmp_path, expected, dict.fromkeys(stored, NF4))
    (note,) = (note for note in make_engine(tmp_path / "model").describe().notes if note.startswith("bitsandbytes"))
    assert note.endswith(
        "12 of its linears stay as they are stored, in four bits, and its other weights are made whole, in float32"
    )


def test_rows_that_share_a_block_are_whole(tmp_path: Path) -> None:
    model = llama()
    config = model.config
    config.intermediate_size = 96
    expected = save_nf4(tmp_path / "model", type(model)(config).eval())
    _, stored = load(tmp_path / "model")
    assert not any("down_proj" in name for name in stored)
    assert any("up_proj" in name for name in stored)
    _answers_of_whole(tmp_path, expected, dict.fromkeys(stored, NF4))


def test_a_block_without_its_largest_is_whole(tmp_path: Path) -> None:
    """Its scale could not be told from its weights; not so one of zeros, which need none."""
    expected = save_nf4(tmp_path / "model", is_nested=False)
    tensors, names = read_weights(tmp_path / "model"), linears_of(expected).keys()
    for codes, largest, are_kept in ((0x78, 0.1, False), (0x78, 0.0, True), (0x77, 0.1, True), (0xF7, 0.1, True)):
        tensors[f"{Q_PROJ}.weight"][32 * 7 : 32 * 8] = codes
        tensors[f"{Q_PROJ}.weight.absmax"][7] = largest
        write_weights(tmp_path / "model", tensors)
        assert load(tmp_path / "model")[1].keys() == names - (set() if are_kept else {f"{Q_PROJ}.weight"})
    _answers_of_whole(tmp_path, load_whole(tmp_path / "model"), linears_of(expected))


def test_a_block_whose_largest_came_out_below_zero_is_whole(tmp_path: Path) -> None:
    """bitsandbytes rounds what is largest to eight bits, in groups of 256 blocks."""
    expected = save_nf4(tmp_path / "model")
    tensors = read_weights(tmp_path / "model")
    codes, table = (tensors[f"{Q_PROJ}.weight.{name}"] for name in ("absmax", "nested_quant_map"))
    codes[7] = 0
    assert table[0] == -1
    tensors[f"{Q_PROJ}.weight.nested_absmax"][:] = 0.3
    write_weights(tmp_path / "model", tensors)
    assert f"{Q_PROJ}.weight" not in load(tmp_path / "model")[1]
    whole = load_whole(tmp_path / "model")
    group = {f"{Q_PROJ.removesuffix('q_proj')}{name}.weight" for name in ("q_proj", "k_proj", "v_proj")}
    _answers_of_whole(tmp_path, whole, dict.fromkeys(linears_of(expected).keys() - group, NF4))


@pytest.mark.parametrize("size", [2.0**-100, 2.0**-112, 2.0**-120, 2.0**-133])
def test_blocks_of_the_smallest_weights_are_rounded_as_others(tmp_path: Path, size: float) -> None:
    save_nf4(tmp_path, is_nested=False)
    tensors = read_weights(tmp_path)
    tensors[f"{Q_PROJ}.weight.absmax"] *= size
    write_weights(tmp_path, tensors)
    whole = load_whole(tmp_path).get_parameter(f"{Q_PROJ}.weight").detach()
    weight = load(tmp_path)[1][f"{Q_PROJ}.weight"]
    assert torch.equal(weight.rounded(whole, ReferenceBackend()), rounded_weight(whole, NF4))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    save_nf4(tmp_path, is_nested=False)
    tensors = read_weights(tmp_path)
    tensors[f"{Q_PROJ}.weight.absmax"][3] = value
    write_weights(tmp_path, tensors)
    with pytest.raises(EngineStartError, match=f"{Q_PROJ}.weight has weights that are not finite"):
        make_engine(tmp_path)


@pytest.mark.parametrize("part", ["weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax"])
def test_what_lacks_a_part_is_refused(tmp_path: Path, part: str) -> None:
    save_nf4(tmp_path)
    tensors = read_weights(tmp_path)
    del tensors[f"{Q_PROJ}.{part}"]
    write_weights(tmp_path, tensors)
    with pytest.raises(ModelRefusedError, match=rf"it lacks {Q_PROJ}\.{part}"):
        load(tmp_path)


def _require_room(folder: Path, monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    monkeypatch.setattr(startup, "available_memory_bytes", lambda: available)
    make_engine(folder)


def test_memory_is_asked_for_what_is_made_whole_alone(
    oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_whole(oracle.model)
    others = sum(weight.nbytes for name, weight in model.named_parameters() if name not in linears_of(model))
    monkeypatch.setattr(startup, "_plan", Mock(side_effect=EngineStartError("planned")))
    with pytest.raises(EngineStartError, match="planned"):
        _require_room(oracle.model, monkeypatch, others)
    with pytest.raises(EngineStartError, match=r"but for those that stay in four bits, in float32 take"):
        _require_room(oracle.model, monkeypatch, others - 1)
    save_nf4(tmp_path, levels=ANY_LEVELS)
    with pytest.raises(EngineStartError, match=r"its weights in float32 take"):
        _require_room(tmp_path, monkeypatch, 4 * others)


def _renamed(folder: Path, change: Callable[[str], str]) -> None:
    write_weights(folder, {change(name): tensor for name, tensor in read_weights(folder).items()})


def test_a_checkpoint_of_a_body_without_the_causal_models_names_stays_so(tmp_path: Path) -> None:
    expected = save_nf4(tmp_path / "model")
    _renamed(tmp_path / "model", lambda name: name.removeprefix("model."))
    assert load(tmp_path / "model")[1].keys() == linears_of(expected).keys()
    _answers_of_whole(tmp_path, load_whole(tmp_path / "model"), linears_of(expected))


def test_the_text_of_a_multimodal_model_stays_so(tmp_path: Path) -> None:
    """Whose file has other names than the model."""
    config = multimodal_config()
    config.text_config.hidden_size, config.text_config.intermediate_size = 64, 128
    model = random_model(config)
    expected = save_nf4(tmp_path / "model", model)
    in_file = {name for name in read_weights(tmp_path / "model") if name.endswith("q_proj.weight")}
    _, stored = load(tmp_path / "model")
    of_text = {name for name, linear in model.named_modules() if isinstance(linear, nn.Linear) and "language" in name}
    assert stored.keys() == {f"{name}.weight" for name in of_text if "lm_head" not in name}
    assert not in_file & {name for name in stored if name.endswith("q_proj.weight")}
    text_only = LoraConfig(r=3, target_modules=["q_proj", "down_proj"], exclude_modules=".*vision_tower.*")
    _answers_of_whole(tmp_path, expected, dict.fromkeys(stored, NF4), lambda _: {"text_only": text_only})


def test_a_weight_that_becomes_another_than_was_thought_is_refused(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {"k_proj": "v_proj", "v_proj": "k_proj"}
    change = re.compile("|".join(others))
    monkeypatch.setattr(
        "loraserve.models.stored_weights.rename_source_key",
        lambda name, *_: (change.sub(lambda found: others[found[0]], name), None),
    )
    with pytest.raises(
        ModelRefusedError, match=r"has \S+\.(k|v)_proj\.weight in four bits, which did not become \S+\.(k|v)_p"
    ):
        load(oracle.model)


def test_that_nothing_is_left_to_round_is_told(oracle: Oracle) -> None:
    notes = make_engine(oracle.model, quantization="int8").describe().notes
    assert "--quantization int8: rounds nothing in the layers, as their weights are in four bits already" in notes
