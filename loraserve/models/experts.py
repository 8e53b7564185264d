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
"""What transformers gives modules that it calls through the interface."""


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    name: str
    module: nn.Module

    @property
    def parameters(self) -> tuple[str, str]:
        """The module's own names of them."""
        return ("gate_up_proj" if _flag(self.module, "has_gate") else "up_proj", "down_proj")

    @property
    def is_transposed(self) -> bool:
        """Its weights are [num_experts, in_features, out_features] in the module."""
        return _flag(self.module, "is_transposed")

    @property
    def linears(self) -> list[tuple[str, ...]]:
        """Of each of `weights`: see `BaseModule.expert_linears`."""
        gate_and_up = ("gate_proj", "up_proj") if _flag(self.module, "is_concatenated") else ()
        return [gate_and_up if _flag(self.module, "has_gate") else ("up_proj",), ("down_proj",)]

    @property
    def weights(self) -> list[tuple[str, Tensor]]:
        """(name of the parameter, [num_experts, out_features, in_features]): of the projection up, then that down."""
        return [(f"{self.name}.{name}", _weight(self.module, name)) for name in self.parameters]


def is_experts(module: nn.Module) -> bool:
    """Whether the module is called through transformers' experts interface."""
    return all(hasattr(module, mark) for mark in _MARKS) and isinstance(getattr(module, "down_proj", None), Tensor)


class Projection(Protocol):
    """One linear of each expert."""

    dtype: torch.dtype

    def __call__(self, x: Tensor, expert: Tensor, ends: Tensor) -> Tensor:
        """x: [P, in_features] and expert: int64 [P], ordered by expert; ends: int32 [num_experts], behind the last row
        of each → [P, out_features]."""
        ...


class GroupedProjection:
    """All experts in one call of torch's, for which the host need not know who is where."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [num_experts, out_features, in_features], bias: [num_experts, out_features]."""
        self.dtype = weight.dtype
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor, expert: Tensor, ends: Tensor) -> Tensor:
        y = grouped_mm(x, self._weight.transpose(1, 2), offs=ends)
        return y if self._bias is None else y + self._bias[expert]


class PackedProjection:
    """A call for each expert that is asked, of the backend's own linears.

    On two EPYC Zen 3 cores, 64 rows for 32 experts of 768 × 512: 2.8 ms where torch's call takes 6.0, in bfloat16 1.7
    and 2.9; 1,024 rows 7.3 and 10.9, in bfloat16 7.2 and 42.
    """

    def __init__(self, linears: Sequence[Linear], dtype: torch.dtype) -> None:
        """Of each expert."""
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
    """What adapters add to the projections up and down of one layer's experts."""

    def __init__(self, groups: Sequence[LoraGroup], context: ForwardContext) -> None:
        """groups: of the two."""
        self.up, self.down = groups
        self._context = context

    def pairs(self, num_tokens: int, token: Tensor, expert: Tensor) -> ExpertPairs | None:
        """None where no row has an adapter."""
        if self._context.adapter_table is None or num_tokens == 0:
            return None
        segments = self._context.current_batch().segments
        return pair_up(segments, num_tokens, token, expert) if segments.has_adapter else None

    def add(self, y: Tensor, x: Tensor, group: LoraGroup, pairs: ExpertPairs) -> None:
        """To the base model's y, in place."""
        context = self._context
        assert context.adapter_table is not None, "pairs without adapters"
        context.await_adapters(group)
        lora_add_experts(context.backend, y, x, group, context.adapter_table, pairs)


class ExpertsLayer:
    """The experts of one layer, computed in order of the experts, with each pair's adapter."""

    def __init__(
        self, spec: ExpertsSpec, projections: Sequence[Projection], adapters: ExpertsAdapters | None = None
    ) -> None:
        """projections: up and down."""
        # `nn.Module` is typed to have tensors and modules as attributes, and nothing else.
        module: Any = spec.module
        self._num_experts: int = module.num_experts
        self._up, self._down = projections
        self._adapters = adapters
        self._activate: Callable[[Tensor], Tensor] = module._apply_gate if module.has_gate else module.act_fn
        self._norm: Callable[[Tensor], Tensor] | None = (
            module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None
        )

    def __call__(self, x: Tensor, expert: Tensor, weight: Tensor) -> Tensor:
        """x: [T, hidden_size]; expert: integers [T, top_k]; weight: [T, top_k], of each expert's output."""
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
    """Whether they are computed here as the model does it; those that are not stay the model's, without adapters."""
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
    """weight_name: with or without the module's."""
    return getattr(module, f"{weight_name.rpartition('.')[2]}_bias").detach() if module.has_bias else None


def _projection(
    module: Any,
    name: str,
    backend: Backend,
    mapped: MappedWeights,
    quantization: Quantization | None,
    stored: StoredWeight | None,
) -> Projection:
    """Takes the module's weight where it is copied."""
    weight, bias = _weight(module, name), _bias(module, name)
    if quantization is None and not backend.packs(weight.dtype):
        return GroupedProjection(weight, bias)
    biases = [None] * len(weight) if bias is None else [*bias]
    if stored is not None:
        of_experts = zip(stored.four_bits(), biases, strict=True)
        linears = [backend.four_bit_linear(four_bits, b, weight.dtype) for four_bits, b in of_experts]
        stored.give_back(mapped)
    else:
        linears = [
            backend.linear(w, b, keep_weight=False, quantization=quantization)
            for w, b in zip(weight, biases, strict=True)
        ]
        mapped.give_back(weight)
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
    """Have the experts computed here. groups: of their projections up and down. Raises `ModelRefusedError`.

    Their weights' memory is given back where they are packed. quantization: see `Backend.linear`. stored: what the
    projections are in the checkpoint, where they stay so.
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
    """As transformers calls it, on our packed batches."""
    layer: ExpertsLayer = vars(module)[_ATTRIBUTE]
    return layer(hidden_states, top_k_index, top_k_weights)


def _weight(module: nn.Module, name: str) -> Tensor:
    weight = module.get_parameter(name).detach()
    return weight.transpose(1, 2) if _flag(module, "is_transposed") else weight


def _flag(module: nn.Module, name: str) -> bool:
    return bool(vars(module)[name])


ExpertsInterface.register(EXPERTS_NAME, experts_forward)
