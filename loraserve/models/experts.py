"""Mixtures of experts with adapters, registered with transformers' `ExpertsInterface` under `EXPERTS_NAME`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from loraserve_kernels.adapter_table import LoraGroup
from loraserve_kernels.backend import Backend
from loraserve_kernels.linear import Linear
from loraserve_kernels.lora_experts import ExpertPairs, lora_add_experts, pair_up
from loraserve_kernels.quantization import Quantization
from torch import Tensor, nn
from torch.nn.functional import grouped_mm
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from loraserve.models.context import ForwardContext
from loraserve.models.errors import DEVICE_ERRORS, ModelRefusedError
from loraserve.models.mapped_weights import MappedWeights
from loraserve.models.rounding import TOLERANCE
from loraserve.models.stored_weights import StoredWeight

EXPERTS_NAME = "loraserve"
_ATTRIBUTE = "loraserve_experts"
_MARKS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
"""Attributes that transformers sets on modules that it calls through the interface."""


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    name: str
    module: nn.Module

    @property
    def parameters(self) -> tuple[str, str]:
        """The module's names for its up and down weights."""
        return ("gate_up_proj" if _flag(self.module, "has_gate") else "up_proj", "down_proj")

    @property
    def is_transposed(self) -> bool:
        """Whether the module stores its weights as [num_experts, in_features, out_features]."""
        return _flag(self.module, "is_transposed")

    @property
    def linears(self) -> list[tuple[str, ...]]:
        """`BaseModule.expert_linears` of each of `weights`."""
        gate_and_up = ("gate_proj", "up_proj") if _flag(self.module, "is_concatenated") else ()
        return [gate_and_up if _flag(self.module, "has_gate") else ("up_proj",), ("down_proj",)]

    @property
    def weights(self) -> list[tuple[str, Tensor]]:
        """(parameter name, [num_experts, out_features, in_features]) of the up projection, then of the down one."""
        return [(f"{self.name}.{name}", _weight(self.module, name)) for name in self.parameters]


def is_experts(module: nn.Module) -> bool:
    """Whether the module is called through transformers' experts interface."""
    return all(hasattr(module, mark) for mark in _MARKS) and isinstance(getattr(module, "down_proj", None), Tensor)


class Projection(Protocol):
    """One linear of each expert."""

    dtype: torch.dtype

    def __call__(self, x: Tensor, expert: Tensor, ends: Tensor) -> Tensor:
        """x: [P, in_features] and expert: int64 [P], both sorted by expert; ends: int32 [num_experts], one past the
        last row of each expert → [P, out_features]."""
        ...


class GroupedProjection:
    """All experts in one torch call; the host does not need to know which rows belong to which expert."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [num_experts, out_features, in_features], bias: [num_experts, out_features]."""
        self.dtype = weight.dtype
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor, expert: Tensor, ends: Tensor) -> Tensor:
        y = grouped_mm(x, self._weight.transpose(1, 2), offs=ends)
        return y if self._bias is None else y + self._bias[expert]


class PackedProjection:
    """One call of a backend linear for each expert that has rows.

    Milliseconds for 32 experts of 768 × 512 on two EPYC Zen 3 cores, this and torch's one call: 64 rows 2.8 and 6.0, in
    bfloat16 1.7 and 2.9; 1,024 rows 7.3 and 10.9, in bfloat16 7.2 and 42.
    """

    def __init__(self, linears: Sequence[Linear], dtype: torch.dtype) -> None:
        """linears: one per expert."""
        self.dtype = dtype
        self._linears = linears

    def __call__(self, x: Tensor, expert: Tensor, ends: Tensor) -> Tensor:
        first = 0
        outputs: list[Tensor] = []
        for linear, end in zip(self._linears, ends.tolist(), strict=True):
            if first < end:
                outputs.append(linear(x[first:end]))
            first = end
        return torch.cat(outputs)


class ExpertsAdapters:
    """Adds the adapters' LoRA to the up and down projections of one layer's experts."""

    def __init__(self, groups: Sequence[LoraGroup], context: ForwardContext) -> None:
        """groups: of the up projection and of the down projection."""
        self.up, self.down = groups
        self._context = context

    def pairs(self, num_tokens: int, token: Tensor, expert: Tensor) -> ExpertPairs | None:
        """None if no row has an adapter."""
        if self._context.adapter_table is None or num_tokens == 0:
            return None
        segments = self._context.current_batch().segments
        return pair_up(segments, num_tokens, token, expert) if segments.has_adapter else None

    def add(self, y: Tensor, x: Tensor, group: LoraGroup, pairs: ExpertPairs) -> None:
        """Add to the base model's y, in place."""
        context = self._context
        assert context.adapter_table is not None, "pairs without adapters"
        context.await_adapters(group)
        lora_add_experts(context.backend, y, x, group, context.adapter_table, pairs)


class ExpertsLayer:
    """The experts of one layer, computed in expert order, each (token, expert) pair with its token's adapter."""

    def __init__(
        self, spec: ExpertsSpec, projections: Sequence[Projection], adapters: ExpertsAdapters | None = None
    ) -> None:
        """projections: up, then down."""
        # `nn.Module` is typed as having only tensors and modules as attributes.
        module: Any = spec.module
        self._num_experts: int = module.num_experts
        self._up, self._down = projections
        self._adapters = adapters
        self._activate: Callable[[Tensor], Tensor] = module._apply_gate if module.has_gate else module.act_fn
        self._norm: Callable[[Tensor], Tensor] | None = (
            module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None
        )

    def __call__(self, x: Tensor, expert: Tensor, weight: Tensor) -> Tensor:
        """x: [T, hidden_size]; expert: integers [T, top_k]; weight: [T, top_k], factors of the experts' outputs."""
        num_tokens, top_k = expert.shape
        expert, order = expert.flatten().long().sort(stable=True)
        token = order // top_k
        experts = torch.arange(self._num_experts, device=x.device)
        ends = torch.searchsorted(expert, experts, right=True, out_int32=True)
        adapters = self._adapters
        pairs = None if adapters is None else adapters.pairs(num_tokens, token, expert)
        rows = x[token].to(self._up.dtype)
        y = self._up(rows, expert, ends)
        if adapters is not None and pairs is not None:
            adapters.add(y, rows, adapters.up, pairs)
        rows = self._activate(y).to(self._down.dtype)
        y = self._down(rows, expert, ends)
        if adapters is not None and pairs is not None:
            adapters.add(y, rows, adapters.down, pairs)
        if self._norm is not None:
            y = self._norm(y)
        y = y * weight.flatten()[order, None]
        in_order = torch.empty_like(y).index_copy_(0, order, y)
        return in_order.view(num_tokens, top_k, -1).sum(1).to(x.dtype)


def can_compute(spec: ExpertsSpec, arguments: Sequence[Tensor], expected: Tensor) -> bool:
    """Whether `ExpertsLayer` reproduces the model's output. If not, the model computes them, without adapters."""
    try:
        grouped = [GroupedProjection(weight, _bias(spec.module, name)) for name, weight in spec.weights]
        found = ExpertsLayer(spec, grouped)(*arguments)
    except DEVICE_ERRORS:
        raise
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):
        return False
    difference = (found.float() - expected.float()).abs().max()
    return bool(difference <= TOLERANCE[expected.dtype] * expected.float().abs().max())


def _bias(module: Any, weight_name: str) -> Tensor | None:
    """weight_name: with or without the module's name before it."""
    return getattr(module, f"{weight_name.rpartition('.')[2]}_bias").detach() if module.has_bias else None


def _projection(
    module: Any,
    name: str,
    backend: Backend,
    mapped: MappedWeights,
    quantization: Quantization | None,
    stored: StoredWeight | None,
) -> Projection:
    """If the weight is copied, the module's own is replaced by an empty parameter."""
    weight, bias = _weight(module, name), _bias(module, name)
    if quantization is None and not backend.packs(weight.dtype):
        return GroupedProjection(weight, bias)
    biases = [None] * len(weight) if bias is None else [*bias]
    if stored is not None:
        of_experts = zip(stored.four_bits(), biases, strict=True)
        linears = [backend.four_bit_linear(four_bits, b, weight.dtype) for four_bits, b in of_experts]
        stored.release_pages(mapped)
    else:
        linears = [
            backend.linear(w, b, keep_weight=False, quantization=quantization)
            for w, b in zip(weight, biases, strict=True)
        ]
        mapped.release_pages(weight)
    setattr(module, name, nn.Parameter(weight.new_empty(0), requires_grad=False))
    return PackedProjection(linears, weight.dtype)


def attach_experts(
    model: PreTrainedModel,
    spec: ExpertsSpec,
    groups: Sequence[LoraGroup],
    context: ForwardContext,
    mapped: MappedWeights,
    *,
    quantization: Quantization | None,
    stored: Sequence[StoredWeight] = (),
) -> None:
    """Have transformers compute the experts with our `ExpertsLayer`. Raises `ModelRefusedError`.

    Weights that are packed give their memory back. groups: of the up and down projections. quantization: see
    `Backend.linear`. stored: the projections' weights from the checkpoint, if they stay in its four-bit form.
    """
    model.set_experts_implementation(EXPERTS_NAME)
    module: Any = spec.module
    if module.config._experts_implementation != EXPERTS_NAME:
        raise ModelRefusedError(
            f"{type(model).__name__} cannot be served: the experts at {spec.name} are not called through transformers' "
            "experts interface"
        )
    adapters = ExpertsAdapters(groups, context)
    projections = [
        _projection(module, name, context.backend, mapped, quantization, weight)
        for name, weight in zip(spec.parameters, stored or (None, None), strict=True)
    ]
    vars(spec.module)[_ATTRIBUTE] = ExpertsLayer(spec, projections, adapters)


def experts_forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Called by transformers, on our packed batches."""
    layer: ExpertsLayer = vars(module)[_ATTRIBUTE]
    return layer(hidden_states, top_k_index, top_k_weights)


def _weight(module: nn.Module, name: str) -> Tensor:
    weight = module.get_parameter(name).detach()
    return weight.transpose(1, 2) if _flag(module, "is_transposed") else weight


def _flag(module: nn.Module, name: str) -> bool:
    return bool(vars(module)[name])


ExpertsInterface.register(EXPERTS_NAME, experts_forward)
