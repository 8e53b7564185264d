"""Linears that stay in four bits on CPUs, as bitsandbytes, GPTQ, AWQ and compressed-tensors store them."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from loraserve_kernels.four_bit_weight import FourBitWeight
from loraserve_kernels.quantization import GROUP, ROUNDINGS, Quantization
from loraserve_kernels.reference_backend import ReferenceBackend
from peft import LoraConfig
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from loraserve.engine import startup
from loraserve.engine.errors import EngineStartError
from loraserve.models import loader
from loraserve.models.causal_model import CausalModel
from loraserve.models.errors import ModelRefusedError
from loraserve.models.quantized_weights import round_weights
from loraserve.models.stored_weights import StoredWeights, rounded_as_packed
from tests.support.engines import make_engine
from tests.support.peft_oracle import NUM_TOKENS, VOCAB_SIZE, Oracle, oracle_of_saved, reference_answers, run_all
from tests.support.quantized_checkpoints import (
    ANY_LEVELS,
    llama,
    mixtral,
    read_weights,
    save_awq,
    save_compressed,
    save_floats,
    save_gptq,
    save_integers,
    save_nf4,
    write_weights,
)
from tests.support.tiny_adapters import adapter_configs
from tests.support.tiny_models import COMMON, multimodal_config, random_model

Q_PROJ = "model.layers.1.self_attn.q_proj"


def load(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, StoredWeights]:
    config = loader.load_config(str(folder), None)
    stored = loader.stored_weights(str(folder), None, config, dtype)
    return loader.load_model(str(folder), None, config, dtype, stored=stored).model, stored


def load_whole(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return loader.load_model(str(folder), None, loader.load_config(str(folder), None), dtype).model


def linears_of(model: PreTrainedModel) -> set[str]:
    return {name for name, weight in model.named_parameters() if ".layers." in name and weight.dim() == 2}


SAVES: dict[str, Callable[[Path], PreTrainedModel]] = {
    "nf4": save_nf4,
    "gptq": save_gptq,
    "gptq-act-order": partial(save_gptq, in_order=False),
    "awq": save_awq,
    "nf4-experts": lambda folder: save_nf4(folder, mixtral()),
    "gptq-experts": lambda folder: save_gptq(folder, mixtral()),
    "gptq-act-order-experts": lambda folder: save_gptq(folder, mixtral(), in_order=False),
    "awq-experts": lambda folder: save_awq(folder, mixtral()),
    "integers": save_integers,
    "integers-act-order": partial(save_integers, in_order=False),
    "integers-experts": lambda folder: save_integers(folder, mixtral(), is_symmetric=True),
    "floats-experts": lambda folder: save_floats(folder, mixtral()),
}


@pytest.fixture(scope="module", params=SAVES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp(request.param)
    return oracle_of_saved(SAVES[request.param](folder / "model"), folder)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp("nf4")
    return oracle_of_saved(save_nf4(folder / "model"), folder)


def _quantization(stated: str) -> Quantization | None:
    return None if stated == "none" else Quantization(stated)


def _of_rounded(oracle: Oracle, quantization: str = "none", backend: str = "auto") -> Oracle:
    expected = load_whole(oracle.model)
    round_weights(expected, _quantization(quantization), load(oracle.model)[1])
    references = reference_answers(expected, oracle.adapters, oracle.prompts, NUM_TOKENS, VOCAB_SIZE)
    settings = {"quantization": quantization, "backend": backend}
    return replace(oracle, references=references, settings=settings, packed=f"packed-{quantization}-{backend}")


def test_answers_equal_peft_on_the_weights_as_packed(saved: Oracle) -> None:
    """With all kinds of adapters."""
    engine, wrong = run_all(_of_rounded(saved))
    assert not wrong
    assert any(note.endswith("its linears stay in four bits, as stored") for note in engine.describe().notes)


@pytest.mark.parametrize(("quantization", "backend"), [*((each, "auto") for each in ROUNDINGS), ("int8", "reference")])
def test_stored_linears_are_not_rounded_again(oracle: Oracle, quantization: str, backend: str) -> None:
    """Whatever the other weights are rounded to."""
    _, wrong = run_all(_of_rounded(oracle, quantization, backend))
    assert not wrong


def test_without_c_kernels_a_checkpoint_is_dequantized_by_default(oracle: Oracle) -> None:
    engine, wrong = run_all(replace(oracle, settings={"backend": "reference"}, packed="packed-whole"))
    assert not wrong
    assert any("its weights are dequantized to float32" in note for note in engine.describe().notes)


def _require_near(folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Packed weights are off by at most the rounding of a scale to bfloat16; with bitsandbytes, also by that of the
    dequantized weight and of NF4's levels."""
    whole, (model, stored) = load_whole(folder, dtype), load(folder, dtype)
    assert stored
    for name, weight in stored.items():
        given, expected = model.get_parameter(name).detach(), whole.get_parameter(name).detach()
        assert (given.shape, given.dtype) == (expected.shape, expected.dtype)
        assert given.untyped_storage().nbytes() <= 4
        assert torch.equal(weight.dequantize(dtype), expected), name
        rounded = rounded_as_packed(weight, given, ReferenceBackend())
        in_groups = expected.float().unflatten(-1, (-1, GROUP))
        off = (rounded.float().unflatten(-1, (-1, GROUP)) - in_groups).abs()
        share = 2**-8 * (2.07 if weight.quantization is Quantization.NF4 else 1) + torch.finfo(dtype).eps
        assert (off <= share * in_groups.abs().amax(-1, keepdim=True)).all(), name
        out = torch.empty_like(expected)
        assert rounded_as_packed(weight, given, ReferenceBackend(), out).data_ptr() == out.data_ptr()
        assert torch.equal(out, rounded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stated", ["bfloat16", "float16"])
@pytest.mark.parametrize("is_nested", [False, True], ids=["plain", "nested"])
def test_packed_nf4_weights_are_near_the_checkpoints(
    tmp_path: Path, dtype: torch.dtype, stated: str, is_nested: bool
) -> None:
    save_nf4(tmp_path, is_nested=is_nested, dtype=stated, storage=torch.bfloat16 if is_nested else torch.uint8)
    _require_near(tmp_path, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_packed_weights_are_near_the_checkpoints(saved: Oracle, dtype: torch.dtype) -> None:
    _require_near(saved.model, dtype)


def test_weight_bytes_counts_stored_linears_at_their_packed_size(oracle: Oracle) -> None:
    """The load-time check dequantizes one linear at a time."""
    made: list[tuple[torch.Size, int]] = []

    class CountingBackend(ReferenceBackend):
        def dequantize_weight(self, weight: FourBitWeight, out: Tensor) -> Tensor:
            made.append((out.shape, out.data_ptr()))
            return super().dequantize_weight(weight, out)

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
    configs: Callable[[PreTrainedModel], Mapping[str, LoraConfig]] = adapter_configs,
    quantization: str = "none",
) -> list[str]:
    """Requires answers equal to those of `expected`. Returns the engine's notes."""
    round_weights(expected, _quantization(quantization), load(folder / "model")[1])
    oracle = oracle_of_saved(expected, folder, configs)
    engine, wrong = run_all(replace(oracle, settings=oracle.settings | {"quantization": quantization}))
    assert not wrong
    return engine.describe().notes


def _with_q_proj_whole(folder: Path) -> PreTrainedModel:
    expected = save_nf4(folder)
    tensors = {name: tensor for name, tensor in read_weights(folder).items() if not name.startswith(f"{Q_PROJ}.")}
    write_weights(folder, tensors | {f"{Q_PROJ}.weight": expected.get_parameter(f"{Q_PROJ}.weight").detach()})
    return expected


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_linears_computed_with_an_unquantized_one_are_dequantized(tmp_path: Path, quantization: str) -> None:
    """q, k and v are computed together, and rounded like other weights."""
    expected = _with_q_proj_whole(tmp_path / "model")
    _answers_of_whole(tmp_path, expected, quantization=quantization)


def test_experts_are_dequantized_if_one_of_them_is_unquantized(tmp_path: Path) -> None:
    """Including their down projections, which are computed with the up projections."""
    expected, folder = save_gptq(tmp_path / "model", mixtral()), tmp_path / "model"
    linear, experts = "model.layers.1.block_sparse_moe.experts.2.w3", "model.layers.1.mlp.experts"
    tensors = {name: tensor for name, tensor in read_weights(folder).items() if not name.startswith(f"{linear}.")}
    whole = expected.get_parameter(f"{experts}.gate_up_proj").detach()[2].chunk(2)[1]
    write_weights(folder, tensors | {f"{linear}.weight": whole})
    stored = load(folder)[1]
    assert f"{experts}.gate_up_proj" not in stored
    assert f"{experts}.down_proj" in stored
    _answers_of_whole(tmp_path, expected)


def test_a_note_counts_the_linears_that_stay_in_four_bits_if_others_do_not(tmp_path: Path) -> None:
    save_nf4(tmp_path, random_model(LlamaConfig(**COMMON | {"intermediate_size": 96, "num_hidden_layers": 1})))
    (note,) = (note for note in make_engine(tmp_path).describe().notes if note.startswith("bitsandbytes"))
    assert note.endswith("6 of its linears stay in four bits, as stored; the others are dequantized to float32")


@pytest.mark.parametrize(
    ("scheme", "form"),
    [
        ("W4A16", Quantization.UINT4_G128),
        ("W4A16_ASYM", Quantization.UINT4_G128),
        ("MXFP4A16", Quantization.MXFP4),
    ],
)
def test_linears_packed_by_compressed_tensors_stay_in_four_bits(
    tmp_path: Path, scheme: str, form: Quantization
) -> None:
    """Packed by its own code."""
    expected = save_compressed(tmp_path / "model", scheme)
    stored = load(tmp_path / "model")[1]
    assert stored.keys() == linears_of(expected)
    assert {weight.quantization for weight in stored.values()} == {form}
    _require_near(tmp_path / "model")
    _answers_of_whole(tmp_path, expected)


@pytest.mark.parametrize("save", [save_gptq, save_integers])
@pytest.mark.parametrize(
    ("group_size", "bits", "is_kept"), [(32, 4, True), (64, 4, True), (-1, 4, True), (48, 4, False), (32, 8, False)]
)
def test_linears_in_groups_of_a_multiple_of_32_stay_in_four_bits(
    tmp_path: Path, save: Callable[..., PreTrainedModel], group_size: int, bits: int, *, is_kept: bool
) -> None:
    """-1: each row is one group."""
    config = LlamaConfig(**COMMON | {"hidden_size": 96, "intermediate_size": 192}, head_dim=24)
    expected = save(tmp_path / "model", random_model(config), bits, group_size=group_size)
    assert load(tmp_path / "model")[1].keys() == (linears_of(expected) if is_kept else set())
    if is_kept:
        _require_near(tmp_path / "model")
    _answers_of_whole(tmp_path, expected)


@pytest.mark.parametrize(
    ("group_size", "form"),
    [(64, Quantization.UINT4), *((size, Quantization.UINT4_G128) for size in (128, 256, 512, -1))],
)
def test_groups_of_a_multiple_of_128_have_one_scale_per_128_inputs(
    tmp_path: Path, group_size: int, form: Quantization
) -> None:
    """Also if a row ends within a group."""
    config = LlamaConfig(**COMMON | {"hidden_size": 128, "intermediate_size": 384}, head_dim=32)
    save_awq(tmp_path, random_model(config), group_size)
    assert {weight.quantization for weight in load(tmp_path)[1].values()} == {form}
    _require_near(tmp_path)


def test_linears_with_an_explicit_sequential_order_stay_in_four_bits(tmp_path: Path) -> None:
    """GPTQ's libraries write it."""
    expected = save_gptq(tmp_path)
    tensors = read_weights(tmp_path)
    linears = [name.removesuffix("qweight") for name in tensors if name.endswith("qweight")]
    in_order = {f"{name}g_idx": torch.arange(8 * len(tensors[f"{name}qweight"])) // GROUP for name in linears}
    write_weights(tmp_path, tensors | {name: rows.int() for name, rows in in_order.items()})
    stored = load(tmp_path)[1]
    assert stored.keys() == linears_of(expected)
    assert all(weight.orders() == [None] for weight in stored.values())
    _require_near(tmp_path)


def test_linears_computed_together_with_different_input_orders_are_dequantized(tmp_path: Path) -> None:
    """q, k and v are computed together."""
    folder = tmp_path / "model"
    save_gptq(folder, in_order=False)
    tensors = read_weights(folder)
    groups = tensors[f"{Q_PROJ}.g_idx"]
    tensors[f"{Q_PROJ}.g_idx"] = (groups + 1) % (groups.max() + 1)
    write_weights(folder, tensors)
    _require_near(folder)
    notes = _answers_of_whole(tmp_path, load_whole(folder))
    kept = "gptq checkpoint: 18 of its linears stay in four bits, as stored"
    assert f"{kept}; the others are dequantized to float32" in notes


def test_a_linear_with_groups_of_other_sizes_than_stated_is_dequantized(tmp_path: Path) -> None:
    expected = save_gptq(tmp_path, in_order=False)
    tensors = read_weights(tmp_path)
    rows = tensors[f"{Q_PROJ}.g_idx"]
    rows[rows.argmax()] = 0
    write_weights(tmp_path, tensors)
    assert load(tmp_path)[1].keys() == linears_of(expected) - {f"{Q_PROJ}.weight"}


def test_each_expert_may_have_its_own_input_order(tmp_path: Path) -> None:
    """Except that its gate and up share one, because they are one weight."""
    save_gptq(tmp_path, mixtral(), in_order=False)
    tensors = read_weights(tmp_path)
    for name in [name for name in tensors if "experts.1." in name and name.endswith("g_idx")]:
        tensors[name] = tensors[name].flip(0)
    write_weights(tmp_path, tensors)
    _require_near(tmp_path)
    stored = load(tmp_path)[1]
    (name,) = (name for name in stored if ".layers.1." in name and name.endswith("gate_up_proj"))
    assert len({tuple(order.tolist()) for order in stored[name].orders() if order is not None}) == 2
    gate = next(name for name in tensors if ".layers.1." in name and "experts.1.w1" in name and name.endswith("g_idx"))
    tensors[gate] = tensors[gate].flip(0)
    write_weights(tmp_path, tensors)
    assert load(tmp_path)[1].keys() == stored.keys() - {name}


def test_nf4_linears_whose_rows_share_a_block_are_dequantized(tmp_path: Path) -> None:
    model = llama()
    config = model.config
    config.intermediate_size = 96
    expected = save_nf4(tmp_path / "model", type(model)(config).eval())
    _, stored = load(tmp_path / "model")
    assert not any("down_proj" in name for name in stored)
    assert any("up_proj" in name for name in stored)
    _answers_of_whole(tmp_path, expected)


def test_nf4_blocks_may_use_any_levels_and_any_absmax(tmp_path: Path) -> None:
    """A block may lack the levels 1 and -1; its absmax may be below zero, as bitsandbytes rounds it to eight bits."""
    save_nf4(tmp_path / "model")
    tensors = read_weights(tmp_path / "model")
    tensors[f"{Q_PROJ}.weight"][32 * 7 : 32 * 8] = 0x78
    tensors[f"{Q_PROJ}.weight.absmax"][9] = 0
    assert tensors[f"{Q_PROJ}.weight.nested_quant_map"][0] == -1
    tensors[f"{Q_PROJ}.weight.nested_absmax"][:] = 0.3
    write_weights(tmp_path / "model", tensors)
    assert f"{Q_PROJ}.weight" in load(tmp_path / "model")[1]
    _answers_of_whole(tmp_path, load_whole(tmp_path / "model"))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_non_finite_nf4_weights_are_refused(tmp_path: Path, value: float) -> None:
    save_nf4(tmp_path, is_nested=False)
    tensors = read_weights(tmp_path)
    tensors[f"{Q_PROJ}.weight.absmax"][3] = value
    write_weights(tmp_path, tensors)
    with pytest.raises(EngineStartError, match=f"{Q_PROJ}.weight has non-finite weights"):
        make_engine(tmp_path)


def test_non_finite_mxfp4_weights_are_refused(tmp_path: Path) -> None:
    save_floats(tmp_path)
    tensors = read_weights(tmp_path)
    tensors[f"{Q_PROJ}.weight_scale"][3, 1] = 251
    write_weights(tmp_path, tensors)
    with pytest.raises(EngineStartError, match=f"{Q_PROJ}.weight has non-finite weights"):
        make_engine(tmp_path)


@pytest.mark.parametrize("part", ["weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax"])
def test_a_linear_that_lacks_a_part_is_refused(tmp_path: Path, part: str) -> None:
    save_nf4(tmp_path)
    tensors = read_weights(tmp_path)
    del tensors[f"{Q_PROJ}.{part}"]
    write_weights(tmp_path, tensors)
    with pytest.raises(ModelRefusedError, match=rf"it lacks {Q_PROJ}\.{part}"):
        load(tmp_path)


def _require_room(folder: Path, monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    monkeypatch.setattr(startup, "available_memory_bytes", lambda: available)
    make_engine(folder)


def test_startup_requires_full_precision_memory_only_for_weights_not_kept_in_four_bits(
    oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_whole(oracle.model)
    needed = sum(weight.nbytes for name, weight in model.named_parameters() if name not in linears_of(model))
    needed += sum(model.get_parameter(name).numel() // 32 * 18 for name in linears_of(model))
    monkeypatch.setattr(startup, "_plan", Mock(side_effect=EngineStartError("planned")))
    with pytest.raises(EngineStartError, match="planned"):
        _require_room(oracle.model, monkeypatch, needed)
    with pytest.raises(EngineStartError, match=r"keeps its four-bit weights as stored: its weights, or .* take"):
        _require_room(oracle.model, monkeypatch, needed - 1)
    save_nf4(tmp_path, levels=ANY_LEVELS)
    with pytest.raises(EngineStartError, match=r"its weights in float32 take"):
        _require_room(tmp_path, monkeypatch, 2 * needed)


def test_loading_requires_memory_for_linears_that_cannot_stay_in_four_bits(tmp_path: Path) -> None:
    """These are known only after the model has computed something."""
    whole = _with_q_proj_whole(tmp_path)
    others = [Q_PROJ.replace("q_proj", f"{name}.weight") for name in ("k_proj", "v_proj")]
    needed = sum(whole.get_parameter(name).nbytes for name in others)
    loaded, stored = load(tmp_path)
    with pytest.raises(ModelRefusedError, match="of LlamaForCausalLM's weights cannot stay in four bits, but only"):
        CausalModel(loaded, ReferenceBackend(), stored=stored, available_bytes=needed - 1)
    loaded, stored = load(tmp_path)
    model = CausalModel(loaded, ReferenceBackend(), stored=stored, available_bytes=needed)
    assert model.stored.keys() == stored.keys() - {*others}


def test_linears_that_the_model_keeps_in_another_dtype_are_dequantized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_gptq(tmp_path)
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", {"o_proj"})
    loaded, stored = load(tmp_path, torch.bfloat16)
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in stored} == {
        *("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
    }
    assert loaded.get_parameter(Q_PROJ.replace("q_proj", "o_proj.weight")).dtype == torch.float32


def _renamed(folder: Path, change: Callable[[str], str]) -> None:
    write_weights(folder, {change(name): tensor for name, tensor in read_weights(folder).items()})


def test_a_checkpoint_without_the_causal_models_name_prefix_stays_in_four_bits(tmp_path: Path) -> None:
    expected = save_nf4(tmp_path / "model")
    _renamed(tmp_path / "model", lambda name: name.removeprefix("model."))
    assert load(tmp_path / "model")[1].keys() == linears_of(expected)
    _answers_of_whole(tmp_path, load_whole(tmp_path / "model"))


def test_the_text_linears_of_a_multimodal_model_stay_in_four_bits(tmp_path: Path) -> None:
    """The names in its file differ from the model's."""
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
    _answers_of_whole(tmp_path, expected, lambda _: {"text_only": text_only})


def test_a_note_says_that_a_towers_linears_are_dequantized(tmp_path: Path) -> None:
    config = multimodal_config()
    config.text_config.hidden_size, config.text_config.intermediate_size = 64, 128
    config.vision_config.hidden_size, config.vision_config.intermediate_size = 64, 128
    save_gptq(tmp_path, random_model(config))
    assert any("vision" in name for name in load(tmp_path)[1])
    (note,) = (note for note in make_engine(tmp_path).describe().notes if note.startswith("gptq"))
    assert note.endswith("of its linears stay in four bits, as stored; the others are dequantized to float32")


def test_a_weight_that_transformers_loads_under_an_unexpected_name_is_refused(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {"k_proj": "v_proj", "v_proj": "k_proj"}
    change = re.compile("|".join(others))
    monkeypatch.setattr(
        "loraserve.models.stored_weights.rename_source_key",
        lambda name, *_: (change.sub(lambda found: others[found[0]], name), None),
    )
    with pytest.raises(
        ModelRefusedError,
        match=r"has \S+\.(k|v)_proj\.weight in four bits, but transformers did not load it as \S+\.(k|v)_p",
    ):
        load(oracle.model)


def test_a_note_says_that_quantization_has_no_effect_on_the_layers(oracle: Oracle) -> None:
    described = make_engine(oracle.model, quantization="int8").describe()
    note = "--quantization int8: no effect on the layers, because their weights are already in four bits"
    assert note in described.notes
    assert described.weights == "int8, 4 bits as stored"
