import pytest
import torch
from loraserve_kernels.reference_backend import ReferenceBackend
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from loraserve.models.module_swaps import FusedGateUpMlp, FusedMlp, swap_modules
from tests.support.tiny_models import tiny_model


@pytest.mark.parametrize("shape", [(1, 5), (5,), (2, 3), (1, 0)], ids=str)
@pytest.mark.parametrize(("architecture", "kind"), [("llama", FusedMlp), ("phi3", FusedGateUpMlp)])
@torch.inference_mode()
def test_fused_mlps_accept_rows_of_any_shape(architecture: str, kind: type, shape: tuple[int, ...]) -> None:
    model = tiny_model(architecture)
    x = torch.randn(*shape, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    expected = model.model.layers[0].mlp(x)
    swap_modules(model, ReferenceBackend())
    fused = model.model.layers[0].mlp
    assert isinstance(fused, kind)
    torch.testing.assert_close(fused(x), expected)


def test_mlps_that_clamp_beyond_the_range_of_the_probe_are_not_swapped() -> None:
    model = tiny_model("llama")
    mlp = model.model.layers[0].mlp

    def forward(x: Tensor) -> Tensor:
        return mlp.down_proj(mlp.act_fn(mlp.gate_proj(x).clamp(max=1000)) * mlp.up_proj(x))

    mlp.forward = forward
    swap_modules(model, ReferenceBackend())
    assert model.model.layers[0].mlp is mlp
    assert isinstance(model.model.layers[1].mlp, FusedMlp)


def test_mlps_with_another_input_size_are_not_swapped() -> None:
    model = tiny_model("llama")
    other = LlamaMLP(LlamaConfig(hidden_size=48, intermediate_size=32, num_attention_heads=4))
    model.add_module("other", other)
    swap_modules(model, ReferenceBackend())
    assert model.get_submodule("other") is other
