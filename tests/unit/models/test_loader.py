"""Which dtype "auto" selects on a CPU."""

import pytest
import torch
from loraserve_kernels.backend import Backend
from loraserve_kernels.choose_backend import choose_backend
from loraserve_kernels.cpu_backend import CpuBackend
from loraserve_kernels.reference_backend import ReferenceBackend
from transformers import Llama4TextConfig, LlamaConfig, MixtralConfig, PreTrainedConfig

from loraserve.models import loader
from tests.support.tiny_models import COMMON

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def packing() -> Backend:
    backend, reason = choose_backend("cpu")
    if not isinstance(backend, CpuBackend):
        pytest.skip(reason)
    return backend


def llama(dtype: str = "bfloat16") -> PreTrainedConfig:
    return LlamaConfig(**COMMON, dtype=dtype)


def with_experts() -> PreTrainedConfig:
    return MixtralConfig(**COMMON, num_local_experts=8, dtype="bfloat16")


def with_experts_of_its_own() -> PreTrainedConfig:
    """Llama 4 does not call its experts through transformers' interface."""
    return Llama4TextConfig(**COMMON, num_local_experts=8, dtype="bfloat16")


@pytest.mark.parametrize("has_instructions", [False, True])
def test_auto_is_bfloat16_on_any_cpu_with_our_linears(
    packing: Backend, has_instructions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "has_fast_bfloat16", lambda: has_instructions)
    assert loader.choose_dtype("auto", llama(), CPU, packing) == torch.bfloat16
    assert loader.choose_dtype("auto", llama("float32"), CPU, packing) == torch.float32
    by_torch = torch.bfloat16 if has_instructions else torch.float32
    assert loader.choose_dtype("auto", llama(), CPU, ReferenceBackend()) == by_torch
    assert loader.choose_dtype("auto", with_experts(), CPU, packing) == torch.bfloat16
    assert loader.choose_dtype("auto", with_experts_of_its_own(), CPU, packing) == by_torch, "torch's products"


def test_a_model_with_experts_is_not_mostly_linears() -> None:
    assert loader.is_mostly_linears(llama())
    assert not loader.is_mostly_linears(with_experts())


def test_a_requested_dtype_is_used(packing: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "has_fast_bfloat16", lambda: False)
    for name, dtype in loader.DTYPES.items():
        assert loader.choose_dtype(name, with_experts(), CPU, packing) == dtype
    assert loader.choose_dtype("auto", with_experts(), torch.device("cuda"), ReferenceBackend()) == torch.bfloat16
