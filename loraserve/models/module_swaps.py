"""Norms and gated MLPs computed by the backend's fused ops, each kept only if it reproduces the original module."""

import inspect

import torch
from loraserve_kernels.backend import Backend
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from loraserve.models.errors import DEVICE_ERRORS
from loraserve.models.forward_names import uses_only

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Largest accepted difference from the original, as a fraction of its largest output: rounding in the dtype."""
_NUM_PROBE_ROWS = 5
_LINEARS = frozenset({"gate_proj", "up_proj", "gate_up_proj", "down_proj"})
_TRAINING = frozenset({"training", "residual_dropout", "dropout", "functional", "nn"})
_MLP_NAMES = _LINEARS | {"act_fn", "activation_fn", "chunk"} | _TRAINING
"""Names that the forwards of plain gated MLPs use. Other MLPs compute more, such as a clamp between their linears."""


class FusedRmsNorm(nn.Module):
    """x: [1, T, D] or [1, T, num_heads, D], as transformers calls it on our packed batches."""

    def __init__(self, weight: Tensor, eps: float, backend: Backend) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps
        self._backend = backend
        self.num_features = weight.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x[0])[None]

    def compute(self, rows: Tensor) -> Tensor:
        """rows: [T, D] or [T, num_heads, D] → the same shape."""
        return self._backend.rms_norm(rows, self.weight, self.eps)


class FusedMlp(nn.Module):
    """down(silu(gate(x)) * up(x)) for x: [1, T, D], or [T, D] for the shared expert of a mixture-of-experts model."""

    def __init__(self, original: nn.Module, backend: Backend) -> None:
        super().__init__()
        self.gate_proj = original.get_submodule("gate_proj")
        self.up_proj = original.get_submodule("up_proj")
        self.down_proj = original.get_submodule("down_proj")
        self._backend = backend

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(self._backend.silu_mul(gate.flatten(0, -2), up.flatten(0, -2)).view(gate.shape))


class FusedGateUpMlp(nn.Module):
    """Like `FusedMlp`, for models whose gate and up projections are one linear, gate first (Phi-3)."""

    def __init__(self, original: nn.Module, backend: Backend) -> None:
        super().__init__()
        self.gate_up_proj = original.get_submodule("gate_up_proj")
        self.down_proj = original.get_submodule("down_proj")
        self._backend = backend

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self._backend.silu_mul(gate.flatten(0, -2), up.flatten(0, -2)).view(gate.shape))


def swap_modules(model: PreTrainedModel, backend: Backend) -> None:
    """Swap each norm and MLP that a fused op reproduces. The linears must compute without adapters during the call."""
    for name, module in list(model.named_modules()):
        replacement = _fused_norm(module, backend) or _fused_mlp(module, backend, model)
        if replacement is not None:
            model.set_submodule(name, replacement)


def _fused_norm(module: nn.Module, backend: Backend) -> nn.Module | None:
    """Tries both conventions: in most families the stored weight is the factor, in Gemma the factor minus one."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if "RMSNorm" not in type(module).__name__ or not isinstance(weight, Tensor) or not isinstance(eps, float):
        return None
    if len(inspect.signature(module.forward).parameters) != 1:
        return None  # it may be called with a gate
    weight = weight.detach()
    x = _probe_input(weight.shape[0], weight.dtype, weight.device)
    plus_one = 1.0 + weight.float()
    for factor in (weight.float(), plus_one):
        rounded = factor.to(weight.dtype)
        fused = FusedRmsNorm(rounded, eps, backend)
        if torch.equal(rounded.float(), factor) and _reproduces(fused, module, x):
            return fused
    return None


def _fused_mlp(module: nn.Module, backend: Backend, model: PreTrainedModel) -> nn.Module | None:
    activation = getattr(module, "act_fn", getattr(module, "activation_fn", None))
    if not isinstance(activation, nn.SiLU | SiLUActivation) or not uses_only(module, _MLP_NAMES):
        return None
    if _has_modules(module, "gate_proj", "up_proj", "down_proj"):
        fused: nn.Module = FusedMlp(module, backend)
    elif _has_modules(module, "gate_up_proj", "down_proj"):
        fused = FusedGateUpMlp(module, backend)
    else:
        return None
    x = _probe_input(model.config.get_text_config().hidden_size, model.dtype, model.device)
    return fused if _reproduces(fused, module, x) else None


def _has_modules(module: nn.Module, *names: str) -> bool:
    """False for experts, which have parameters of the same names, each with the weights of all experts."""
    return all(isinstance(getattr(module, name, None), nn.Module) for name in names)


def _probe_input(num_features: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    rows = torch.randn(1, _NUM_PROBE_ROWS, num_features, generator=torch.Generator().manual_seed(0))
    return rows.to(device, dtype)


def _reproduces(fused: nn.Module, original: nn.Module, x: Tensor) -> bool:
    """Also False if the original rejects such an input: it may not be an MLP or norm of the decoder."""
    try:
        with torch.inference_mode():
            expected, found = original(x).float(), fused(x).float()
    except DEVICE_ERRORS:
        raise
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return False
    return bool((found - expected).abs().max() <= TOLERANCE[x.dtype] * expected.abs().max())
