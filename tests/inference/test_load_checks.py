"""The server's notes name the optimizations that load-time checks disable; a device error ends the load instead."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loraserve_kernels.backend import KernelTooLargeError
from loraserve_kernels.composed_decoder_layer import ComposedDecoderLayer
from loraserve_kernels.decoder_layer import DecoderLayer, DecoderLayerParts
from loraserve_kernels.decoder_model import ModelOutput
from loraserve_kernels.reference_backend import ReferenceBackend
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from loraserve.models import rounding, self_check
from loraserve.models.causal_model import CausalModel
from loraserve.models.errors import ModelRefusedError
from loraserve.models.forward import DirectForward
from loraserve.models.fused_attention import FusedAttention
from loraserve.models.fused_layer import FusedDecoderLayer
from loraserve.models.loader import dummy_model
from loraserve.models.self_check import TransformersForward
from tests.support.tiny_models import tiny_model


class LayerBackend(ReferenceBackend):
    """Has whole layers, and applies `spoil` to the result of each."""

    def __init__(self, spoil: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._spoil = spoil

    def decoder_layer(self, parts: DecoderLayerParts) -> DecoderLayer:
        layer = ComposedDecoderLayer(parts, self)
        return lambda *arguments: self._spoil(layer(*arguments))


def prepared(spoil: Callable[[Tensor], Tensor] = lambda rows: rows) -> CausalModel:
    model = CausalModel(tiny_model("llama"), LayerBackend(spoil))
    model.prepare(128, 260, lambda *_: None)
    return model


def restless() -> PreTrainedModel:
    """In bfloat16, with weights that let each layer amplify rounding errors."""
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    return dummy_model(config, torch.bfloat16, seed=0)


def fail(error: Exception) -> Callable[[Tensor], Tensor]:
    def spoil(_: Tensor) -> Tensor:
        raise error

    return spoil


def has_fused_layers(model: CausalModel) -> bool:
    return any(isinstance(module, FusedDecoderLayer) for module in model._model.modules())


def test_there_are_no_notes_if_layers_are_fused_and_called_directly() -> None:
    model = prepared()
    assert isinstance(model._forward, DirectForward)
    assert model.notes == []


@pytest.mark.parametrize("spoil", [lambda rows: 2 * rows, fail(RuntimeError("of the model's own kind"))])
def test_fused_layers_that_fail_or_change_the_logits_are_undone_and_noted(spoil: Callable[[Tensor], Tensor]) -> None:
    model = prepared(spoil)
    assert not has_fused_layers(model)
    assert [note.partition(":")[0] for note in model.notes] == ["fused layers"]


def test_a_model_that_amplifies_rounding_errors_passes_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    differences = []
    check = self_check.check

    def noted(*arguments) -> float:
        differences.append(check(*arguments))
        return differences[-1]

    monkeypatch.setattr(self_check, "check", noted)
    model = CausalModel(restless(), LayerBackend(lambda rows: rows))
    model.prepare(128, 260, lambda *_: None)
    assert max(differences) > rounding.TOLERANCE[torch.bfloat16], "else the model shows nothing"
    assert model.notes == []


@pytest.mark.parametrize("architecture", ["mixtral", "llama"])
def test_only_models_with_experts_are_compared_at_several_prompts(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first, rounding may have sent a token to another expert; without experts, any difference is an error."""
    check, first_tokens = self_check.check, set()

    def differs_at_first(model: PreTrainedModel, attention: Any, context: Any, probe: self_check.Probe) -> float:
        first_tokens.add(probe.token_ids[0][0])
        return 1.0 if len(first_tokens) == 1 else check(model, attention, context, probe)

    monkeypatch.setattr(self_check, "check", differs_at_first)
    model = CausalModel(tiny_model(architecture), ReferenceBackend())
    if architecture == "llama":
        with pytest.raises(ModelRefusedError, match="differ from its own by 1 "):
            model.prepare(128, 260, lambda *_: None)
    else:
        model.prepare(128, 260, lambda *_: None)
        assert len(first_tokens) == 2


def test_a_model_with_experts_that_differs_at_all_prompts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    probes: list[self_check.Probe] = []
    monkeypatch.setattr(self_check, "check", lambda *arguments: probes.append(arguments[3]) or 1.0)
    with pytest.raises(ModelRefusedError, match="differ from its own by 1 "):
        CausalModel(tiny_model("mixtral"), ReferenceBackend()).prepare(128, 260, lambda *_: None)
    assert len({tuple(probe.token_ids[0]) for probe in probes}) == len(probes) == 4


def test_wrong_layers_are_noticed_in_a_model_that_amplifies_rounding_errors() -> None:
    model = CausalModel(restless(), LayerBackend(lambda rows: rows.roll(1, dims=1)))
    model.prepare(128, 260, lambda *_: None)
    assert [note.partition(":")[0] for note in model.notes] == ["fused layers"]


def test_layers_that_clamp_values_no_probe_reaches_are_not_fused() -> None:
    model = tiny_model("llama")
    layer = model.model.layers[1]
    original = layer.forward
    layer.forward = lambda *arguments, **named: original(*arguments, **named).clamp(max=1e6)
    causal = CausalModel(model, LayerBackend(lambda rows: rows))
    causal.prepare(128, 260, lambda *_: None)
    assert not has_fused_layers(causal)
    assert any(isinstance(module, FusedAttention) for module in model.modules())


def test_a_direct_forward_with_other_bits_is_disabled_and_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DirectForward, "__call__", lambda self, batch: ModelOutput(torch.zeros(2, 260)))
    model = prepared()
    assert isinstance(model._forward, TransformersForward)
    assert has_fused_layers(model)
    assert [note.partition(":")[0] for note in model.notes] == ["direct forward"]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("out of memory"),
        torch.AcceleratorError("illegal access"),
        KernelTooLargeError("shared memory"),
    ],
)
def test_a_device_error_ends_the_load(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    model.get_input_embeddings().forward = fail(error)
    with pytest.raises(type(error)):
        CausalModel(model, ReferenceBackend())
    with pytest.raises(type(error)):
        prepared(fail(error))
    monkeypatch.setattr(DirectForward, "__call__", lambda self, batch: fail(error)(batch.token_ids))
    with pytest.raises(type(error)):
        prepared()
    monkeypatch.setattr(LayerBackend, "paged_attention", lambda self, q, *_, **__: fail(error)(q))
    with pytest.raises(type(error)):
        prepared()
