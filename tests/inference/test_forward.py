"""A model with fused layers runs without transformers' own forward, but only if that gives the same bits."""

import pytest
import torch
from loraserve_kernels.backend import Backend
from loraserve_kernels.choose_backend import choose_backend
from loraserve_kernels.cpu_backend import CpuBackend
from torch import Tensor
from transformers import PreTrainedModel

from loraserve.models.causal_model import CausalModel
from loraserve.models.embedding import PackedEmbedding
from loraserve.models.forward import DirectForward, TransformersForward
from loraserve.models.fused_layer import FusedLayers
from tests.support.tiny_models import tiny_model

MAX_MODEL_LEN = 128


@pytest.fixture(scope="module")
def backend() -> Backend:
    """The CPU backend. Skips the test without a compiler, because no layer is fused then."""
    backend, reason = choose_backend("cpu")
    if not isinstance(backend, CpuBackend):
        pytest.skip(f"no fused layers here ({reason})")
    return backend


def prepared(model: PreTrainedModel, backend: Backend) -> CausalModel:
    causal = CausalModel(model, backend)
    causal.prepare(MAX_MODEL_LEN, model.config.vocab_size, lambda *_: None)
    return causal


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3", "smollm3"])
def test_models_whose_layers_are_fused_use_the_direct_forward(architecture: str, backend: Backend) -> None:
    assert isinstance(prepared(tiny_model(architecture, 0), backend)._forward, DirectForward)


@pytest.mark.parametrize("is_tied", [False, True], ids=["own lm_head", "tied"])
def test_the_direct_forward_computes_the_whole_model_in_one_op(
    is_tied: bool, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tied_llama() if is_tied else tiny_model("llama", 0)
    monkeypatch.setattr(FusedLayers, "compute", lambda *_: pytest.fail("the layers were called by themselves"))
    forward = prepared(model, backend)._forward
    assert isinstance(forward, DirectForward)
    assert forward._op is not None


def tied_llama() -> PreTrainedModel:
    model = tiny_model("llama", 0)
    model.get_output_embeddings().weight = model.get_input_embeddings().weight
    return model


def test_a_tied_embedding_is_in_memory_once(backend: Backend) -> None:
    model = tied_llama()
    ids = torch.arange(model.config.vocab_size)
    expected = model.get_input_embeddings()(ids)
    causal = prepared(model, backend)
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, PackedEmbedding)
    assert torch.equal(embedding(ids), expected)
    assert sum(parameter.nbytes for parameter in model.parameters()) < expected.nbytes
    assert causal.notes == []


def test_a_tied_embedding_whose_weight_the_model_reads_itself_is_not_packed(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tied_llama()
    original = model.model.forward

    def forward(input_ids: Tensor, **arguments: Tensor) -> object:
        return original(**arguments | {"inputs_embeds": model.model.embed_tokens.weight[input_ids]})

    monkeypatch.setattr(model.model, "forward", forward)
    expected = model.get_input_embeddings().weight.clone()
    causal = prepared(model, backend)
    assert torch.equal(model.get_input_embeddings().weight, expected)
    assert any("tied embedding" in note for note in causal.notes)


@pytest.mark.parametrize("architecture", ["gemma2", "granite", "olmo2"])
def test_other_models_keep_transformers_forward(architecture: str, backend: Backend) -> None:
    assert isinstance(prepared(tiny_model(architecture, 0), backend)._forward, TransformersForward)


def test_models_on_the_reference_backend_keep_transformers_forward() -> None:
    backend, _ = choose_backend("cpu", "reference")
    assert isinstance(prepared(tiny_model("llama", 0), backend)._forward, TransformersForward)


@pytest.mark.parametrize("where", ["embedding", "logits"])
def test_models_with_arithmetic_outside_their_modules_keep_transformers_forward(
    where: str, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its effect is below the tolerance of the other checks."""
    model = tiny_model("llama", 0)
    original = model.forward if where == "logits" else model.model.forward

    def scaled_logits(**arguments: Tensor) -> object:
        output = original(**arguments)
        output.logits = output.logits * 1.00001
        return output

    def scaled_embedding(input_ids: Tensor, **arguments: Tensor) -> object:
        embedded = model.model.embed_tokens(input_ids) * 1.00001
        return original(**arguments | {"inputs_embeds": embedded})

    if where == "logits":
        monkeypatch.setattr(model, "forward", scaled_logits)
    else:
        monkeypatch.setattr(model.model, "forward", scaled_embedding)
    assert isinstance(prepared(model, backend)._forward, TransformersForward)
