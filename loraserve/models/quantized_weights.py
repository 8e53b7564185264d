"""Base models with quantized layers: which weights are quantized, and the model that results.

Quantized are the weights of linears and experts that can have adapters. Routers and gates of experts are not: a small
change there sends a token to other experts. With int4, `lm_head` and other linears that see only the sampled rows are
quantized too, in eight bits: in small models `lm_head` is half of what is read for a token. A tied embedding is rounded
with it.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType

import torch
from loraserve_kernels.backend import Backend
from loraserve_kernels.four_bit_weight import have_one_order
from loraserve_kernels.quantization import STORED, Quantization
from loraserve_kernels.reference_backend import ReferenceBackend
from torch import Tensor, nn
from transformers import PreTrainedModel

from loraserve.models.bare_weights import BareWeightSpec
from loraserve.models.embedding import is_table, is_tied
from loraserve.models.errors import ModelRefusedError
from loraserve.models.experts import ExpertsSpec
from loraserve.models.stored_weights import StoredWeight, StoredWeights, rounded_as_packed
from loraserve.models.structure import LinearsSpec, ModelStructure, record_structure

Spare = defaultdict[tuple[torch.Size, torch.dtype, bool], list[Tensor]]
"""Tensors for reuse; those of stored weights are separate, because their strides differ."""
_FEW = 0.5
"""The operator gets a note if a smaller fraction of the weights outside embeddings and `lm_head` is rounded."""


@dataclass(frozen=True, slots=True)
class QuantizedParameter:
    """A parameter that is to be rounded, or that its checkpoint stores in four bits."""

    module_name: str
    module: nn.Module
    name: str
    """Its name in the module."""
    quantization: Quantization
    is_transposed: bool = False
    """An experts' weight with outputs along the last dimension, not the second to last."""
    stored: StoredWeight | None = None
    """The weight that its value is a placeholder for."""

    @property
    def value(self) -> nn.Parameter:
        return self.module.get_parameter(self.name)

    @property
    def saved_bytes(self) -> int:
        """Memory that quantizing it saves."""
        value, depth = self.value, self._depth
        return value.nbytes - value.numel() // depth * self.quantization.row_bytes(depth)

    @property
    def _depth(self) -> int:
        return self.value.shape[-2 if self.is_transposed else -1]

    def rounded(self, backend: Backend, out: Tensor | None = None) -> Tensor:
        """Its value after quantization. out: an earlier result, which is overwritten and returned. Raises
        `ModelRefusedError` if weights are not finite, because they have no scale."""
        value = self.value.detach()
        if self.stored is not None:
            return rounded_as_packed(self.stored, value, backend, out)
        if self.is_transposed:
            rounded = torch.empty_like(value) if out is None else out
            for to, expert in zip(rounded, value, strict=True):  # one at a time, because each is copied
                to.copy_(backend.rounded_weight(expert.mT, self.quantization).mT)
        else:
            rounded = backend.rounded_weight(value, self.quantization, out)
        # One weight of each group: if any is not finite, none that shares its scale is.
        step = self.quantization.group_size(self._depth)
        some = rounded[..., ::step, :] if self.is_transposed else rounded[..., ::step]
        if not some.isfinite().all():
            raise ModelRefusedError(
                f"{self.module_name}.{self.name} has non-finite weights, which cannot be quantized: omit --quantization"
            )
        return rounded


def quantizations_of(
    model: PreTrainedModel,
    structure: ModelStructure,
    quantization: Quantization | None,
    stored: StoredWeights = MappingProxyType({}),
) -> list[Quantization | None]:
    """The quantization of each of `structure.adaptable`; None = not quantized. stored: weights that the checkpoint has
    in four bits already, which are not rounded further."""
    num_experts = {
        len(weight) for spec in structure.adaptable if isinstance(spec, ExpertsSpec) for _, weight in spec.weights
    }

    def form_of(spec: LinearsSpec | ExpertsSpec) -> Quantization | None:
        """Weights computed together stay as stored only if all do, in one form and, for linears, one input order."""
        weights = [stored[name] for name in parameters_of(spec) if name in stored]
        forms = {weight.quantization for weight in weights}
        if len(forms) != 1 or len(weights) < len(parameters_of(spec)):
            return None
        orders = [order for weight in weights for order in weight.orders()]
        return forms.pop() if isinstance(spec, ExpertsSpec) or have_one_order(orders) else None

    def of(spec: LinearsSpec | BareWeightSpec | ExpertsSpec) -> Quantization | None:
        if isinstance(spec, ExpertsSpec):
            return form_of(spec) or quantization
        if isinstance(spec, BareWeightSpec):
            return None
        if num_experts and any(linear.out_features in {1, *num_experts} for _, linear in spec.members):
            return None  # routers
        if spec.is_absorbed:
            return None  # never multiplied as a whole
        if not spec.has_sampled_rows:
            return form_of(spec) or quantization
        is_alone = not any(is_tied(linear, model) for _, linear in spec.members)
        is_rounded = quantization is Quantization.INT4 and (is_alone or is_table(model.get_input_embeddings()))
        return Quantization.INT8 if is_rounded else None

    return [of(spec) for spec in structure.adaptable]


def parameters_of(spec: LinearsSpec | ExpertsSpec) -> list[str]:
    """Names of the weights that are computed together."""
    if isinstance(spec, ExpertsSpec):
        return [f"{spec.name}.{name}" for name in spec.parameters]
    return [f"{name}.weight" for name, _ in spec.members]


def stored_parameters(model: PreTrainedModel, stored: StoredWeights) -> dict[str, QuantizedParameter]:
    """By their names in the model."""

    def parameter(path: str, weight: StoredWeight) -> QuantizedParameter:
        module_name, _, name = path.rpartition(".")
        module = model.get_submodule(module_name)
        return QuantizedParameter(module_name, module, name, weight.quantization, weight.is_transposed, weight)

    return {path: parameter(path, weight) for path, weight in stored.items()}


def quantized_parameters(
    model: PreTrainedModel,
    structure: ModelStructure,
    quantizations: Sequence[Quantization | None],
    stored: Mapping[str, QuantizedParameter] = MappingProxyType({}),
) -> Iterator[QuantizedParameter]:
    """quantizations: see `quantizations_of`. stored: from `stored_parameters`. A tied embedding comes last."""
    embedding = model.get_input_embeddings()
    of_embedding: Quantization | None = None
    for spec, quantization in zip(structure.adaptable, quantizations, strict=True):
        if quantization is None:
            continue
        if quantization in STORED and isinstance(spec, LinearsSpec | ExpertsSpec):
            yield from (stored[name] for name in parameters_of(spec))
        elif isinstance(spec, ExpertsSpec):
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
    """Memory that quantizing them saves; a shared weight counts once."""
    once = {id(parameter.value): parameter for parameter in parameters}
    return sum(parameter.saved_bytes for parameter in once.values())


def quantization_coverage_note(
    model: PreTrainedModel, parameters: Sequence[QuantizedParameter], quantization: Quantization
) -> str | None:
    """A note for the operator if most of the layers' weights are not rounded, else None.

    Raises `ModelRefusedError` if none of them is.
    """
    name, option = type(model).__name__, f"--quantization {quantization}"
    tables = model.get_input_embeddings(), model.get_output_embeddings()
    ids = {id(weight) for table in tables if table is not None for weight in table.parameters()}
    num_rounded = sum(parameter.value.numel() for parameter in parameters if id(parameter.value) not in ids)
    if num_rounded and all(parameter.stored for parameter in parameters if id(parameter.value) not in ids):
        return f"{option}: no effect on the layers, because their weights are already in four bits"
    if num_rounded == 0:
        raise ModelRefusedError(f"{name} has no linears or experts that {option} could quantize: omit it")
    num_others = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in ids)
    if num_rounded >= _FEW * num_others:
        return None
    return f"{option}: only {num_rounded / num_others:.0%} of the weights of {name}'s layers are quantized"


def round_weights(
    model: PreTrainedModel,
    quantization: Quantization | None,
    stored: StoredWeights = MappingProxyType({}),
) -> None:
    """Round weights in place, as an engine with this quantization would. stored: weights that stay in four bits."""
    structure, backend = record_structure(model), ReferenceBackend()
    quantizations = quantizations_of(model, structure, quantization, stored)
    for parameter in quantized_parameters(model, structure, quantizations, stored_parameters(model, stored)):
        parameter.value.data = parameter.rounded(backend)


@contextmanager
def rounded_while_computing(parameters: Collection[QuantizedParameter], backend: Backend) -> Iterator[None]:
    """In the block each module computes with rounded weights, and keeps its own.

    Its own are often mapped from files and take no memory until they are written. The rounded ones take the memory of
    one weight per shape, which all layers share: with new memory each time, rounding took 2.6 times as long.
    """
    spare: Spare = defaultdict(list)
    with ExitStack() as handles:
        for parameter in parameters:
            begin, end = _swaps(parameter, backend, spare)
            handles.callback(parameter.module.register_forward_pre_hook(begin).remove)
            handles.callback(parameter.module.register_forward_hook(end, always_call=True).remove)
        yield


def _swaps(
    parameter: QuantizedParameter, backend: Backend, spare: Spare
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Hooks for (before, after) a call of its module."""
    module, name, own = parameter.module, parameter.name, parameter.value
    free = spare[own.shape, own.dtype, parameter.stored is not None]

    def begin(*_: object) -> None:
        rounded = parameter.rounded(backend, free.pop() if free else None)
        module.register_parameter(name, nn.Parameter(rounded, requires_grad=False))

    def end(*_: object) -> None:
        if parameter.value is not own:
            free.append(parameter.value.detach())
            module.register_parameter(name, own)

    return begin, end
