"""Linears that stay in NF4 on CPUs, as bitsandbytes has them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loraserve_kernels.quantization import ROUNDINGS, Quantization
from loraserve_kernels.quantized_weight import rounded_weight
from loraserve_kernels.reference_backend import ReferenceBackend
from torch import Tensor
from transformers import PreTrainedModel

from loraserve.engine import startup
from loraserve.engine.errors import EngineStartError
from loraserve.models import loader
from loraserve.models.causal_model import CausalModel
from loraserve.models.errors import ModelRefusedError
from loraserve.models.quantized_weights import round_weights
from tests.support.engines import make_engine
from tests.support.peft_oracle import NUM_TOKENS, VOCAB_SIZE, Oracle, oracle_of_saved, reference_answers, run_all
from tests.support.quantized_checkpoints import llama, mixtral, read_weights, save_nf4, write_weights

NF4 = Quantization.NF4
Q_PROJ = "model.layers.1.self_attn.q_proj"


def load(folder: Path, dtype: torch.dtype = torch.float32, *, keeps_stored: bool = True) -> loader.LoadedModel:
    config = loader.load_config(str(folder), None)
    return loader.load_model(str(folder), None, config, dtype, keeps_stored=keeps_stored)


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
    expected = load(oracle.model, keeps_stored=False).model
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
    whole, kept = load(tmp_path, dtype, keeps_stored=False).model, load(tmp_path, dtype)
    assert kept.stored.keys() == linears_of(whole).keys()
    assert kept.stored.keys() == loader.forms_kept(str(tmp_path), None, loader.load_config(str(tmp_path), None)).keys()
    for name, weight in kept.stored.items():
        placeholder, expected = kept.model.get_parameter(name), whole.get_parameter(name)
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

    loaded = load(oracle.model, torch.bfloat16)
    model = CausalModel(loaded.model, CountingBackend(), stored=loaded.stored)
    whole = load(oracle.model, torch.bfloat16, keeps_stored=False).model
    sizes = [whole.get_parameter(name).numel() for name in loaded.stored]
    saved = sum(2 * size - size // 32 * 18 for size in sizes)
    assert model.weight_bytes == sum(weight.nbytes for weight in whole.parameters()) - saved
    made.clear()
    model.prepare(128, 260, lambda *_: None)
    in_proof = made[: -len(sizes)]
    assert len(in_proof) > 2 * len(sizes)
    assert len(set(in_proof)) <= len({whole.get_parameter(name).shape for name in loaded.stored})


def _answers_of_whole(folder: Path, expected: PreTrainedModel, stored: dict[str, Quantization]) -> None:
    round_weights(expected, None, stored)
    _, wrong = run_all(oracle_of_saved(expected, folder))
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
    loaded = load(tmp_path / "model")
    assert {name.split(".")[4] for name in loaded.stored} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    _answers_of_whole(tmp_path, expected, dict.fromkeys(loaded.stored, NF4))


def test_rows_that_share_a_block_are_whole(tmp_path: Path) -> None:
    model = llama()
    config = model.config
    config.intermediate_size = 96
    expected = save_nf4(tmp_path / "model", type(model)(config).eval())
    loaded = load(tmp_path / "model")
    assert not any("down_proj" in name for name in loaded.stored)
    assert any("up_proj" in name for name in loaded.stored)
    _answers_of_whole(tmp_path, expected, dict.fromkeys(loaded.stored, NF4))


def test_a_block_without_its_largest_is_whole(tmp_path: Path) -> None:
    """Its scale could not be told from its weights."""
    expected = save_nf4(tmp_path / "model", is_nested=False)
    tensors = read_weights(tmp_path / "model")
    tensors[f"{Q_PROJ}.weight"][32 * 7 : 32 * 8] = 0x77  # zeros
    write_weights(tmp_path / "model", tensors)
    assert load(tmp_path / "model").stored.keys() == linears_of(expected).keys() - {f"{Q_PROJ}.weight"}
    tensors[f"{Q_PROJ}.weight.absmax"][7] = 0
    write_weights(tmp_path / "model", tensors)
    assert load(tmp_path / "model").stored.keys() == linears_of(expected).keys()


@pytest.mark.parametrize("size", [2.0**-100, 2.0**-112, 2.0**-120, 2.0**-133])
def test_blocks_of_the_smallest_weights_are_rounded_as_others(tmp_path: Path, size: float) -> None:
    save_nf4(tmp_path, is_nested=False)
    tensors = read_weights(tmp_path)
    tensors[f"{Q_PROJ}.weight.absmax"] *= size
    write_weights(tmp_path, tensors)
    kept, whole = load(tmp_path), load(tmp_path, keeps_stored=False).model.get_parameter(f"{Q_PROJ}.weight").detach()
    weight = kept.stored[f"{Q_PROJ}.weight"]
    assert torch.equal(weight.rounded(whole, ReferenceBackend()), rounded_weight(whole, NF4))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    save_nf4(tmp_path, is_nested=False)
    tensors = read_weights(tmp_path)
    tensors[f"{Q_PROJ}.weight.absmax"][3] = value
    write_weights(tmp_path, tensors)
    with pytest.raises(EngineStartError, match=f"{Q_PROJ}.weight has weights that are not finite"):
        make_engine(tmp_path)


def _without(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(f"{Q_PROJ}.{name}")


@pytest.mark.parametrize("part", ["weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax"])
def test_what_lacks_a_part_is_refused(tmp_path: Path, part: str) -> None:
    save_nf4(tmp_path)
    tensors = read_weights(tmp_path)
    _without(part)(tensors)
    write_weights(tmp_path, tensors)
    with pytest.raises(ModelRefusedError, match=rf"it lacks {Q_PROJ}\.{part}"):
        load(tmp_path)


def test_memory_for_whole_weights_is_not_asked_for(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "num_weight_bytes", lambda *_: 1 << 60)
    make_engine(oracle.model)
    monkeypatch.setattr(startup, "_keeps_stored", lambda *_: False)
    with pytest.raises(EngineStartError, match="made whole as it is loaded"):
        make_engine(oracle.model)
