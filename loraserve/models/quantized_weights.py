"""A base model whose layers have their weights in fewer bits: which weights these are, and the model they make.

Those of linears and of experts, as far as they can have adapters; routers and gates of experts stay as they are, where
little sends a token to other experts. In four bits also `lm_head`, and what else sees the sampled rows alone, in eight:
of small models it is half of what is read for a token. An embedding that is one with it is rounded with it.
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
"""Tensors that nobody uses, those of stored weights apart, which have other strides."""
_FEW = 0.5
"""A share of the weights that are neither of embeddings nor of `lm_head`."""


@dataclass(frozen=True, slots=True)
class QuantizedParameter:
    """One that is to be rounded, or is stored so."""

    module_name: str
    module: nn.Module
    name: str
    """In its module."""
    quantization: Quantization
    is_transposed: bool = False
    """It is of experts, and its outputs are along the last dimension, not the one before."""
    stored: StoredWeight | None = None
    """What its value is a placeholder for."""

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

    def rounded(self, backend: Backend, out: Tensor | None = None) -> Tensor:
        """out: one that was rounded before, which is overwritten and returned. Raises `ModelRefusedError` where there
        is no scale for it."""
        value = self.value.detach()
        if self.stored is not None:
            return rounded_as_packed(self.stored, value, backend, out)
        if self.is_transposed:
            rounded = torch.empty_like(value) if out is None else out
            for to, expert in zip(rounded, value, strict=True):  # one at a time, as it is copied
                to.copy_(backend.rounded_weight(expert.mT, self.quantization).mT)
        else:
            rounded = backend.rounded_weight(value, self.quantization, out)
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
    model: PreTrainedModel,
    structure: ModelStructure,
    quantization: Quantization | None,
    stored: StoredWeights = MappingProxyType({}),
) -> list[Quantization | None]:
    """Of what can have adapters, in its order; None = it stays as it is. stored: what is in four bits in the checkpoint
    already, which is rounded no further. Raises `ModelRefusedError`."""
    num_experts = {
        len(weight) for spec in structure.adaptable if isinstance(spec, ExpertsSpec) for _, weight in spec.weights
    }

    def form_of(spec: LinearsSpec | ExpertsSpec) -> Quantization | None:
        """What is computed together stays as it is stored if all of it does, and rows come to all in one order."""
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
    """quantizations: see `quantizations_of`. stored: of `stored_parameters`. An embedding that is one with `lm_head`
    comes last."""
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
    if num_rounded and all(parameter.stored for parameter in parameters if id(parameter.value) not in ids):
        return f"{option}: rounds nothing in the layers, as their weights are in four bits already"
    if num_rounded == 0:
        raise ModelRefusedError(f"{name} has no linears or experts that {option} could round: leave it out")
    num_others = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in ids)
    if num_rounded >= _FEW * num_others:
        return None
    return f"{option}: of {name}'s layers only {num_rounded / num_others:.0%} of the weights are rounded"


def round_weights(
    model: PreTrainedModel,
    quantization: Quantization | None,
    stored: StoredWeights = MappingProxyType({}),
) -> None:
    """In place: the model that an engine with such weights computes. stored: what stays so in it."""
    structure, backend = record_structure(model), ReferenceBackend()
    quantizations = quantizations_of(model, structure, quantization, stored)
    for parameter in quantized_parameters(model, structure, quantizations, stored_parameters(model, stored)):
        parameter.value.data = parameter.rounded(backend)


@contextmanager
def rounded_while_computing(parameters: Collection[QuantizedParameter], backend: Backend) -> Iterator[None]:
    """In the block each module computes with rounded weights, and keeps its own.

    They are often mappings of files, which take no memory until they are written. Rounded ones take as much as one of
    each shape, which all layers share: in memory that is new each time, rounding took 2.6 times as long.
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
    """(before, after) a call of its module."""
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
