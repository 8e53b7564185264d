"""A base model whose layers have their weights in eight bits: which weights these are, and the model they make.

Those of linears and of experts. Embeddings, `lm_head`, what else sees the sampled rows alone, and routers, where little
sends a token to other experts, stay as they are.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from loraserve_kernels.int8_weight import rounded_to_int8
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from loraserve.models.bare_weights import BareWeightSpec
from loraserve.models.errors import ModelRefusedError
from loraserve.models.experts import ExpertsSpec
from loraserve.models.structure import LinearsSpec, ModelStructure, record_structure

_SCALE_BYTES = 4


class Int8Parameter(NamedTuple):
    """One that is to be rounded."""

    module_name: str
    module: nn.Module
    name: str
    """In its module."""
    is_transposed: bool
    """Its outputs are along the last dimension, not the one before."""

    @property
    def value(self) -> nn.Parameter:
        return self.module.get_parameter(self.name)

    @property
    def saved_bytes(self) -> int:
        """How much less memory it takes."""
        value = self.value
        num_outputs = value.numel() // value.shape[-2 if self.is_transposed else -1]
        return value.numel() * (value.element_size() - 1) - num_outputs * _SCALE_BYTES

    def rounded(self) -> Tensor:
        """Raises `ModelRefusedError` where there is no scale for it."""
        value = self.value.detach()
        rounded = rounded_to_int8(value.mT if self.is_transposed else value)
        if not rounded[..., 0].isfinite().all():  # nor is anything of an output with one weight that is not
            raise ModelRefusedError(
                f"{self.module_name}.{self.name} has weights that are not finite, and no form in eight bits: leave "
                "--quantization out"
            )
        return rounded.mT.contiguous() if self.is_transposed else rounded


def is_int8(spec: LinearsSpec | BareWeightSpec | ExpertsSpec) -> bool:
    """Whether its weights are among those that are rounded."""
    return isinstance(spec, ExpertsSpec) or (isinstance(spec, LinearsSpec) and not spec.has_sampled_rows)


def int8_parameters(structure: ModelStructure) -> Iterator[Int8Parameter]:
    for spec in structure.adaptable:
        if isinstance(spec, ExpertsSpec):
            for name in spec.parameters:
                yield Int8Parameter(spec.name, spec.module, name, spec.is_transposed)
        elif isinstance(spec, LinearsSpec) and is_int8(spec):
            for name, linear in spec.members:
                yield Int8Parameter(name, linear, "weight", is_transposed=False)


def round_weights(model: PreTrainedModel) -> None:
    """In place: the model that an engine with such weights computes."""
    for parameter in int8_parameters(record_structure(model)):
        parameter.value.data = parameter.rounded()


def round_while_computing(parameters: Sequence[Int8Parameter]) -> list[RemovableHandle]:
    """Until the handles are removed, each module computes with rounded weights and keeps its own.

    They are often mappings of files, which take no memory until they are written.
    """
    return [handle for parameter in parameters for handle in _round_in_calls(parameter)]


def _round_in_calls(parameter: Int8Parameter) -> Iterator[RemovableHandle]:
    module, name = parameter.module, parameter.name
    own = module.get_parameter(name)

    def begin(*_: object) -> None:
        module.register_parameter(name, nn.Parameter(parameter.rounded(), requires_grad=False))

    def end(*_: object) -> None:
        module.register_parameter(name, own)

    yield module.register_forward_pre_hook(begin)
    yield module.register_forward_hook(end, always_call=True)
