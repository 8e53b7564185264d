"""Quantized weights: the engine's answers equal PEFT's on the model with the same weights rounded."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from loraserve_kernels.linear import Linear
from loraserve_kernels.quantization import ROUNDINGS, Quantization
from loraserve_kernels.quantized_weight import rounded_weight
from loraserve_kernels.reference_backend import ReferenceBackend
from torch import Tensor, nn
from transformers import AfmoeConfig, AutoModelForCausalLM, GPT2Config, PreTrainedModel

from loraserve.engine.errors import EngineStartError
from loraserve.models.causal_model import CausalModel
from loraserve.models.errors import ModelRefusedError
from loraserve.models.quantized_weights import (
    quantizations_of,
    quantized_parameters,
    round_weights,
    rounded_while_computing,
)
from loraserve.models.structure import record_structure
from tests.support.engines import make_engine, run
from tests.support.peft_oracle import NUM_TOKENS, VOCAB_SIZE, Oracle, OracleOf, run_all, wrong_answers
from tests.support.tiny_adapters import reference_answers
from tests.support.tiny_models import FAMILIES, random_model, tiny_model

ROUTER = "model.layers.1.mlp.router.gate.weight"
LAST = "model.layers.1.mlp.down_proj.weight"
EXPERT_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


def rounded_by_name(model: PreTrainedModel, quantization: Quantization) -> PreTrainedModel:
    """In place: every linear except the head, and every expert, but no routers, expert gates or up-projections.

    With int4, also the head in eight bits, with an embedding tied to it, unless that embedding scales its output.
    """
    others = ("lm_head", "router", "expert_gate", "kv_b_proj")
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not any(other in name for other in others):
            module.weight.data = rounded_weight(module.weight.data, quantization)
        for weight_name, weight in module.named_parameters(recurse=False):
            if weight_name in EXPERT_WEIGHTS and weight.dim() == 3:
                data = weight.data.mT if vars(module)["is_transposed"] else weight.data
                rounded = rounded_weight(data, quantization)
                weight.data = rounded.mT if vars(module)["is_transposed"] else rounded
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if quantization is Quantization.INT4 and (head.weight is not embedding.weight or type(embedding) is nn.Embedding):
        head.weight.data = rounded_weight(head.weight.data, Quantization.INT8)
    return model


def rounded(oracle: Oracle, quantization: Quantization, dtype: torch.dtype = torch.float32) -> Oracle:
    """References are computed in float32, with weights that were rounded in the dtype."""
    model = AutoModelForCausalLM.from_pretrained(oracle.model, dtype=dtype, attn_implementation="eager").eval()
    model = rounded_by_name(model, quantization).float()
    references = reference_answers(model, oracle.adapters, oracle.prompts, NUM_TOKENS, VOCAB_SIZE)
    settings = oracle.settings | {"quantization": quantization}
    return replace(oracle, references=references, settings=settings, packed=f"{oracle.packed}-{quantization}")


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def oracle(request: pytest.FixtureRequest, oracle_of: OracleOf) -> Oracle:
    return oracle_of(request.param)


@pytest.fixture(params=ROUNDINGS)
def quantization(request: pytest.FixtureRequest) -> Quantization:
    return request.param


def test_answers_equal_those_of_the_rounded_model(oracle: Oracle, quantization: Quantization) -> None:
    of_rounded = rounded(oracle, quantization)
    engine, digests = of_rounded.engine()
    answers = run(engine, of_rounded.requests(digests))
    assert not wrong_answers(of_rounded, answers)
    assert wrong_answers(oracle, answers), "weights were not rounded"
    assert engine.describe().quantization == quantization


def test_round_weights_rounds_the_right_weights_in_every_architecture(
    oracle: Oracle, quantization: Quantization
) -> None:
    ours, expected = (AutoModelForCausalLM.from_pretrained(oracle.model).eval() for _ in range(2))
    round_weights(ours, quantization)
    rounded_by_name(expected, quantization)
    for (name, weight), (_, wanted) in zip(ours.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(weight, wanted), name


def test_rounding_while_computing_reuses_one_tensor_per_shape() -> None:
    """The weights themselves stay in place."""
    model = tiny_model("llama")
    places = {name: weight.data_ptr() for name, weight in model.named_parameters()}
    rounded_to: list[tuple[torch.Size, int]] = []

    class CountingBackend(ReferenceBackend):
        def rounded_weight(self, weight: Tensor, quantization: Quantization, out: Tensor | None = None) -> Tensor:
            rounded = super().rounded_weight(weight, quantization, out)
            rounded_to.append((rounded.shape, rounded.data_ptr()))
            return rounded

    structure = record_structure(model)
    quantizations = quantizations_of(model, structure, Quantization.INT8)
    parameters = [*quantized_parameters(model, structure, quantizations)]
    with rounded_while_computing(parameters, CountingBackend()):
        for _ in range(2):
            model(torch.tensor([[1, 2, 3]]))
    assert len(rounded_to) == 2 * len(parameters) > 2 * len(set(rounded_to))
    assert len(set(rounded_to)) == len({shape for shape, _ in rounded_to})
    assert {name: weight.data_ptr() for name, weight in model.named_parameters()} == places


def afmoe() -> PreTrainedModel:
    """Its routers are linears."""
    sizes = {"intermediate_size": 112, "moe_intermediate_size": 32, "num_hidden_layers": 3, "num_dense_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    return random_model(AfmoeConfig(vocab_size=260, hidden_size=64, **sizes, **heads, **experts))


def test_routers_that_are_linears_are_not_rounded() -> None:
    ours, expected = afmoe(), rounded_by_name(afmoe(), Quantization.INT8)
    round_weights(ours, Quantization.INT8)
    assert torch.equal(ours.get_parameter(ROUTER), afmoe().get_parameter(ROUTER))
    for (name, weight), (_, wanted) in zip(ours.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(weight, wanted), name


def test_a_model_without_weights_to_round_is_refused(quantization: Quantization) -> None:
    config = GPT2Config(vocab_size=260, n_embd=64, n_layer=2, n_head=4, n_positions=256)
    refused = f"GPT2LMHeadModel has no linears or experts that --quantization {quantization}"
    with pytest.raises(ModelRefusedError, match=refused):
        CausalModel(random_model(config), ReferenceBackend(), quantization)


def test_a_note_states_the_quantized_share_of_weights_if_it_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not CausalModel(tiny_model("mixtral"), ReferenceBackend(), Quantization.INT8).notes
    monkeypatch.setattr("loraserve.models.structure.can_compute", lambda *_: False)
    (note,) = CausalModel(tiny_model("mixtral"), ReferenceBackend(), Quantization.INT8).notes
    assert re.search(r"only [1-4]\d% of the weights of MixtralForCausalLM's layers are quantized", note)


def test_answers_in_bfloat16_equal_those_of_the_rounded_model(oracle_of: OracleOf, quantization: Quantization) -> None:
    _, wrong = run_all(rounded(oracle_of("llama").on("cpu", "bfloat16"), quantization, torch.bfloat16))
    assert not wrong


@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_without_c_kernels_answers_are_the_same_and_a_note_explains_why_they_are_slow(
    oracle_of: OracleOf, architecture: str, quantization: Quantization
) -> None:
    engine, wrong = run_all(rounded(oracle_of(architecture), quantization), backend="reference")
    assert not wrong
    assert any("each step dequantizes the weights again" in note for note in engine.describe().notes)


class SpoiltBackend(ReferenceBackend):
    """Its quantized linears give their outputs in another order."""

    def linear(
        self, weight: Tensor, bias: Tensor | None, *, keep_weight: bool, quantization: Quantization | None = None
    ) -> Linear:
        weight = weight if quantization is None else weight.roll(1, dims=0)
        return super().linear(weight, bias, keep_weight=keep_weight, quantization=quantization)


def test_wrong_quantized_linears_are_noticed_at_load() -> None:
    with pytest.raises(ModelRefusedError, match="its logits differ from its own"):
        CausalModel(tiny_model("llama"), SpoiltBackend(), Quantization.INT8).prepare(128, 260, lambda *_: None)


def test_the_model_keeps_its_original_weights_until_they_are_packed() -> None:
    model, untouched = tiny_model("llama"), tiny_model("llama")
    calls: list[int] = []

    def note(done: int, _total: int) -> None:
        if not calls:
            assert torch.equal(model.get_parameter(LAST), untouched.get_parameter(LAST))
        calls.append(done)

    CausalModel(model, ReferenceBackend(), Quantization.INT8).prepare(128, 260, note)
    assert calls


@pytest.mark.parametrize("architecture", ["llama", "qwen3"], ids=["alone", "tied"])
@pytest.mark.parametrize(
    ("quantization", "row_bytes"), [("int8", lambda k: k + 4), ("int4", lambda k: (k + 31) // 32 * 18)]
)
def test_weight_bytes_counts_weights_at_their_quantized_size(
    quantization: str, row_bytes: Callable[[int], int], architecture: str
) -> None:
    """An embedding tied to `lm_head` counts once."""
    model = tiny_model(architecture)
    linears = [module for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]
    saved = sum(linear.weight.nbytes - linear.out_features * row_bytes(linear.in_features) for linear in linears)
    if quantization == "int4":
        saved += 3 * model.lm_head.weight.numel() - 4 * model.lm_head.out_features
    plain = CausalModel(model, ReferenceBackend()).weight_bytes
    assert CausalModel(model, ReferenceBackend(), Quantization(quantization)).weight_bytes == plain - saved


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_weights_are_refused(value: float, quantization: Quantization) -> None:
    model = tiny_model("llama")
    model.get_parameter(LAST).data[3, 5] = value
    with pytest.raises(ModelRefusedError, match=rf"^{LAST} has non-finite weights"):
        CausalModel(model, ReferenceBackend(), quantization).prepare(128, 260, lambda *_: None)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_an_unknown_quantization_is_refused(oracle_of: OracleOf) -> None:
    with pytest.raises(EngineStartError, match="--quantization awq is not supported: choose one of none, int8, int4"):
        make_engine(oracle_of("llama").model, quantization="awq")
