"""A base model whose layers have their weights in fewer bits: which weights these are, and the model they make.

Those of linears and of experts, as far as they can have adapters; routers and gates of experts stay as they are, where
little sends a token to other experts. In four bits also `lm_head`, and what else sees the sampled rows alone, in eight:
of small models it is half of what is read for a token. An embedding that is one with it is rounded with it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from loraserve_kernels.quantization import Quantization
from loraserve_kernels.quantized_weight import rounded_weight
from torch import Tensor, nn
from transformers import PreTrainedModel

from loraserve.models.bare_weights import BareWeightSpec
from loraserve.models.embedding import is_table, is_tied
from loraserve.models.errors import ModelRefusedError
from loraserve.models.experts import ExpertsSpec
from loraserve.models.structure import LinearsSpec, ModelStructure, record_structure


class RoundWeight(Protocol):
    """As `rounded_weight`."""

    def __call__(self, weight: Tensor, quantization: Quantization, out: Tensor | None = None) -> Tensor: ...


Spare = defaultdict[tuple[torch.Size, torch.dtype], list[Tensor]]
"""Tensors that nobody uses."""
_FEW = 0.5
"""A share of the weights that are neither of embeddings nor of `lm_head`."""


@dataclass(frozen=True, slots=True)
class QuantizedParameter:
    """One that is to be rounded."""

    module_name: str
    module: nn.Module
    name: str
    """In its module."""
    quantization: Quantization
    is_transposed: bool = False
    """It is of experts, and its outputs are along the last dimension, not the one before."""

    @property
    def value(self) -> nn.Parameter:
        return self.module.get_parameter(self.name)

    @property
    def saved_bytes(self) -> int:
        """How much less memory it takes."""
        value, depth = self.value, self._depth
        return value.nbytes - value.numel() // depth * self.quantization.row_bytes(depth)

    @property
    def _depth(self) -> int:
        return self.value.shape[-2 if self.is_transposed else -1]

    def rounded(self, round_weight: RoundWeight, out: Tensor | None = None) -> Tensor:
        """out: see `rounded_weight`. Raises `ModelRefusedError` where there is no scale for it."""
        value = self.value.detach()
        if self.is_transposed:
            rounded = torch.empty_like(value) if out is None else out
            for to, expert in zip(rounded, value, strict=True):  # one at a time, as it is copied
                to.copy_(round_weight(expert.mT, self.quantization).mT)
        else:
            rounded = round_weight(value, self.quantization, out)
        # One of each group: where a weight is not finite, nothing is that shares its scale.
        step = self.quantization.group_size(self._depth)
        some = rounded[..., ::step, :] if self.is_transposed else rounded[..., ::step]
        if not some.isfinite().all():
            raise ModelRefusedError(
                f"{self.module_name}.{self.name} has weights that are not finite, and no form in fewer bits: leave "
                "--quantization out"
            )
        return rounded


def quantizations_of(
    model: PreTrainedModel, structure: ModelStructure, quantization: Quantization | None
) -> list[Quantization | None]:
    """Of what can have adapters, in its order; None = it stays as it is."""
    num_experts = {
        len(weight) for spec in structure.adaptable if isinstance(spec, ExpertsSpec) for _, weight in spec.weights
    }

    def of(spec: LinearsSpec | BareWeightSpec | ExpertsSpec) -> Quantization | None:
        if not isinstance(spec, LinearsSpec):
            return quantization if isinstance(spec, ExpertsSpec) else None
        if num_experts and any(linear.out_features in {1, *num_experts} for _, linear in spec.members):
            return None  # routers
        if not spec.has_sampled_rows:
            return quantization
        is_alone = not any(is_tied(linear, model) for _, linear in spec.members)
        is_rounded = quantization is Quantization.INT4 and (is_alone or is_table(model.get_input_embeddings()))
        return Quantization.INT8 if is_rounded else None

    return [of(spec) for spec in structure.adaptable]


def quantized_parameters(
    model: PreTrainedModel, structure: ModelStructure, quantizations: Sequence[Quantization | None]
) -> Iterator[QuantizedParameter]:
    """quantizations: see `quantizations_of`. An embedding that is one with `lm_head` comes last."""
    embedding = model.get_input_embeddings()
    of_embedding: Quantization | None = None
    for spec, quantization in zip(structure.adaptable, quantizations, strict=True):
        if quantization is None:
            continue
        if isinstance(spec, ExpertsSpec):
            for name in spec.parameters:
                yield QuantizedParameter(spec.name, spec.module, name, quantization, spec.is_transposed)
        elif isinstance(spec, LinearsSpec):
            for name, linear in spec.members:
                yield QuantizedParameter(name, linear, "weight", quantization)
                of_embedding = quantization if is_tied(linear, model) else of_embedding
    if of_embedding is not None:
        (name,) = (name for name, module in model.named_modules() if module is embedding)
        yield QuantizedParameter(name, embedding, "weight", of_embedding)


def saved_bytes(parameters: Sequence[QuantizedParameter]) -> int:
    """How much less memory they take."""
    once = {id(parameter.value): parameter for parameter in parameters}
    return sum(parameter.saved_bytes for parameter in once.values())


def few_rounded(
    model: PreTrainedModel, parameters: Sequence[QuantizedParameter], quantization: Quantization
) -> str | None:
    """What the person who started the server is told where most of the layers' weights are left as they are.

    Raises `ModelRefusedError` where all of them are.
    """
    name, option = type(model).__name__, f"--quantization {quantization}"
    tables = model.get_input_embeddings(), model.get_output_embeddings()
    ids = {id(weight) for table in tables if table is not None for weight in table.parameters()}
    num_rounded = sum(parameter.value.numel() for parameter in parameters if id(parameter.value) not in ids)
    if num_rounded == 0:
        raise ModelRefusedError(f"{name} has no linears or experts that {option} could round: leave it out")
    num_others = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in ids)
    if num_rounded >= _FEW * num_others:
        return None
    return f"{option}: of {name}'s layers only {num_rounded / num_others:.0%} of the weights are rounded"


def round_weights(model: PreTrainedModel, quantization: Quantization) -> None:
    """In place: the model that an engine with such weights computes."""
    structure = record_structure(model)
    for parameter in quantized_parameters(model, structure, quantizations_of(model, structure, quantization)):
        parameter.value.data = parameter.rounded(rounded_weight)


@contextmanager
def rounded_while_computing(parameters: Sequence[QuantizedParameter], round_weight: RoundWeight) -> Iterator[None]:
    """In the block each module computes with rounded weights, and keeps its own.

    They are often mappings of files, which take no memory until they are written. Rounded ones take as much as one of
    each shape, which all layers share: in memory that is new each time, rounding took 2.6 times as long.
    """
    spare: Spare = defaultdict(list)
    with ExitStack() as handles:
        for parameter in parameters:
            begin, end = _swaps(parameter, round_weight, spare)
            handles.callback(parameter.module.register_forward_pre_hook(begin).remove)
            handles.callback(parameter.module.register_forward_hook(end, always_call=True).remove)
        yield


def _swaps(
    parameter: QuantizedParameter, round_weight: RoundWeight, spare: Spare
) -> tuple[Callable[..., None], Callable[..., None]]:
    """(before, after) a call of its module."""
    module, name, own = parameter.module, parameter.name, parameter.value
    free = spare[own.shape, own.dtype]

    def begin(*_: object) -> None:
        rounded = parameter.rounded(round_weight, free.pop() if free else None)
        module.register_parameter(name, nn.Parameter(rounded, requires_grad=False))

    def end(*_: object) -> None:
        if parameter.value is not own:
            free.append(parameter.value.detach())
            module.register_parameter(name, own)

    return begin, end
