"""Weights in eight bits: the engine's answers are PEFT's on the model whose weights are rounded so."""

import re
from dataclasses import replace

import pytest
import torch
from loraserve_kernels.int8_weight import rounded_to_int8
from loraserve_kernels.linear import Linear
from loraserve_kernels.reference_backend import ReferenceBackend
from torch import Tensor, nn
from transformers import AfmoeConfig, AutoModelForCausalLM, GPT2Config, PreTrainedModel

from loraserve.engine.errors import EngineStartError
from loraserve.models.causal_model import CausalModel
from loraserve.models.errors import ModelRefusedError
from loraserve.models.int8_weights import int8_parameters, int8_specs, round_weights, rounded_while_computing
from loraserve.models.structure import record_structure
from tests.support.engines import make_engine, run
from tests.support.peft_oracle import NUM_TOKENS, VOCAB_SIZE, Oracle, OracleOf, run_all, wrong_answers
from tests.support.tiny_adapters import reference_answers
from tests.support.tiny_models import CONFIGS, EXPERTS, random_model, tiny_model

ROUTER = "model.layers.1.mlp.router.gate.weight"
LAST = "model.layers.1.mlp.down_proj.weight"
EXPERT_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


def rounded_by_name(model: PreTrainedModel) -> PreTrainedModel:
    """In place: every linear but the head, and every expert, but no router and no gate of experts."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head" and "router" not in name and "expert_gate" not in name:
            module.weight.data = rounded_to_int8(module.weight.data)
        for weight_name, weight in module.named_parameters(recurse=False):
            if weight_name in EXPERT_WEIGHTS and weight.dim() == 3:
                is_transposed = bool(vars(module)["is_transposed"])
                weight.data = rounded_to_int8(weight.data.mT).mT if is_transposed else rounded_to_int8(weight.data)
    return model


def rounded(oracle: Oracle, dtype: torch.dtype = torch.float32) -> Oracle:
    """In float32, of weights that were rounded in the dtype."""
    model = AutoModelForCausalLM.from_pretrained(oracle.model, dtype=dtype, attn_implementation="eager").eval()
    model = rounded_by_name(model).float()
    references = reference_answers(model, oracle.adapters, oracle.prompts, NUM_TOKENS, VOCAB_SIZE)
    settings = oracle.settings | {"quantization": "int8"}
    return replace(oracle, references=references, settings=settings, packed=f"{oracle.packed}-int8")


@pytest.fixture(scope="module", params=sorted(CONFIGS | EXPERTS))
def oracle(request: pytest.FixtureRequest, oracle_of: OracleOf) -> Oracle:
    return oracle_of(request.param)


def test_answers_are_those_of_the_rounded_model(oracle: Oracle) -> None:
    int8 = rounded(oracle)
    engine, digests = int8.engine()
    answers = run(engine, int8.requests(digests))
    assert not wrong_answers(int8, answers)
    assert wrong_answers(oracle, answers), "weights were not rounded"
    assert engine.describe().quantization == "int8"


def test_the_weights_to_round_are_found_in_every_architecture(oracle: Oracle) -> None:
    ours, expected = (AutoModelForCausalLM.from_pretrained(oracle.model).eval() for _ in range(2))
    round_weights(ours)
    rounded_by_name(expected)
    for (name, weight), (_, wanted) in zip(ours.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(weight, wanted), name


def test_the_proof_rounds_into_memory_of_one_tensor_of_each_shape() -> None:
    """And leaves the weights where they are."""
    model = tiny_model("llama")
    places = {name: weight.data_ptr() for name, weight in model.named_parameters()}
    rounded_to: list[tuple[torch.Size, int]] = []

    def round_weight(weight: Tensor, out: Tensor | None) -> Tensor:
        rounded = rounded_to_int8(weight, out)
        rounded_to.append((rounded.shape, rounded.data_ptr()))
        return rounded

    parameters = [*int8_parameters(int8_specs(record_structure(model)))]
    with rounded_while_computing(parameters, round_weight):
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


def test_routers_that_are_linears_stay_as_they_are() -> None:
    ours, expected = afmoe(), rounded_by_name(afmoe())
    round_weights(ours)
    assert torch.equal(ours.get_parameter(ROUTER), afmoe().get_parameter(ROUTER))
    for (name, weight), (_, wanted) in zip(ours.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(weight, wanted), name


def test_a_model_of_which_nothing_can_be_rounded_is_refused() -> None:
    config = GPT2Config(vocab_size=260, n_embd=64, n_layer=2, n_head=4, n_positions=256)
    with pytest.raises(ModelRefusedError, match="GPT2LMHeadModel has no linears or experts that --quantization int8"):
        CausalModel(random_model(config), ReferenceBackend(), int8=True)


def test_a_model_of_which_little_is_rounded_says_how_little(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not CausalModel(tiny_model("mixtral"), ReferenceBackend(), int8=True).notes
    monkeypatch.setattr("loraserve.models.structure.can_compute", lambda *_: False)
    (note,) = CausalModel(tiny_model("mixtral"), ReferenceBackend(), int8=True).notes
    assert re.search(r"of MixtralForCausalLM's layers only [1-4]\d% of the weights are rounded", note)


def test_answers_in_bfloat16_are_those_of_the_rounded_model(oracle_of: OracleOf) -> None:
    _, wrong = run_all(rounded(oracle_of("llama").on("cpu", "bfloat16"), torch.bfloat16))
    assert not wrong


@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_without_c_kernels_answers_are_the_same_and_a_note_says_why_they_take_long(
    oracle_of: OracleOf, architecture: str
) -> None:
    engine, wrong = run_all(rounded(oracle_of(architecture)), backend="reference")
    assert not wrong
    assert any("each step makes weights whole again" in note for note in engine.describe().notes)


class SpoiltBackend(ReferenceBackend):
    """Its linears in eight bits give their outputs in another order."""

    def linear(self, weight: Tensor, bias: Tensor | None, *, keep_weight: bool, int8: bool = False) -> Linear:
        return super().linear(weight.roll(1, dims=0) if int8 else weight, bias, keep_weight=keep_weight, int8=int8)


def test_wrong_linears_are_noticed_when_a_model_is_loaded() -> None:
    with pytest.raises(ModelRefusedError, match="its logits differ from its own"):
        CausalModel(tiny_model("llama"), SpoiltBackend(), int8=True).prepare(128, 260, lambda *_: None)


def test_the_model_keeps_its_own_weights_until_they_are_packed() -> None:
    model, untouched = tiny_model("llama"), tiny_model("llama")
    calls: list[int] = []

    def note(done: int, _total: int) -> None:
        if not calls:
            assert torch.equal(model.get_parameter(LAST), untouched.get_parameter(LAST))
        calls.append(done)

    CausalModel(model, ReferenceBackend(), int8=True).prepare(128, 260, note)
    assert calls


def test_the_memory_of_weights_is_counted_as_it_will_be() -> None:
    model = tiny_model("llama")
    linears = [module for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]
    saved = sum(3 * linear.weight.numel() - 4 * linear.out_features for linear in linears)
    plain = CausalModel(model, ReferenceBackend()).weight_bytes
    assert CausalModel(model, ReferenceBackend(), int8=True).weight_bytes == plain - saved


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    model = tiny_model("llama")
    model.get_parameter(LAST).data[3, 5] = value
    with pytest.raises(ModelRefusedError, match=rf"^{LAST} has weights that are not finite"):
        CausalModel(model, ReferenceBackend(), int8=True).prepare(128, 260, lambda *_: None)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_an_unknown_quantization_is_refused(oracle_of: OracleOf) -> None:
    with pytest.raises(EngineStartError, match="--quantization awq is not supported: choose none or int8"):
        make_engine(oracle_of("llama").model, quantization="awq")
