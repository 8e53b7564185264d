"""Experts whose weights stay as their checkpoint has them, in MXFP4: nothing is lost, never are all of them whole."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from loraserve_kernels.backend import Backend
from loraserve_kernels.quantization import GROUP
from safetensors import safe_open
from torch import Tensor

from loraserve.models.errors import ModelRefusedError
from loraserve.models.mapped_weights import MappedWeights
from loraserve.models.model_files import weight_files
from loraserve.models.quantized_checkpoint import stored_tensors

_BLOCKS, _SCALES = "_blocks", "_scales"
_LARGEST_SCALE = 250
"""Of which all elements are finite, whatever they are rounded to."""


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """Of one projection of all experts of a layer, as `whole_mxfp4` takes it; mapped from the file."""

    blocks: Tensor
    """[num_experts, out_features, groups, GROUP / 2]."""
    scales: Tensor

    def placeholder(self, dtype: torch.dtype) -> Tensor:
        """Of the weight's shape in the model, [num_experts, in_features, out_features], and without memory."""
        num_experts, out_features, groups, _ = self.blocks.shape
        return torch.empty((), dtype=dtype).expand(num_experts, groups * GROUP, out_features)

    def whole(self, like: Tensor, backend: Backend, out: Tensor | None = None) -> Tensor:
        """Of the placeholder's shape and dtype. out: one that was made before, which is overwritten and returned."""
        num_experts, in_features, out_features = like.shape
        dense = like.new_empty(num_experts, out_features, in_features) if out is None else out.mT
        return backend.whole_mxfp4(self.blocks, self.scales, dense).mT

    def give_back(self, mapped: MappedWeights) -> None:
        mapped.give_back(self.blocks)
        mapped.give_back(self.scales)


StoredWeights = Mapping[str, StoredWeight]
"""By the name of the parameter in the model."""


def names_of_stored(model: str, revision: str | None) -> frozenset[str]:
    """Of the parameters that are in MXFP4 in the checkpoint. Raises `ModelRefusedError`."""
    names = stored_tensors(model, revision)
    return frozenset(name.removesuffix(_BLOCKS) for name in names if name.endswith(_BLOCKS))


def read_stored(
    model: str, revision: str | None, dtype: torch.dtype, parameters: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], StoredWeights]:
    """(all tensors of the checkpoint by name, with placeholders for the stored weights, those).

    parameters: of the model, whose values are not looked at. Raises `ModelRefusedError`.
    """
    tensors: dict[str, Tensor] = {}
    for path in weight_files(model, revision):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, a file is no mapping
    stored: dict[str, StoredWeight] = {}
    for name in [name.removesuffix(_BLOCKS) for name in tensors if name.endswith(_BLOCKS)]:
        weight = StoredWeight(tensors.pop(name + _BLOCKS), tensors.pop(name + _SCALES))
        _check(name, weight, parameters.get(name))
        stored[name], tensors[name] = weight, weight.placeholder(dtype)
    return tensors, stored


def _check(name: str, weight: StoredWeight, parameter: Tensor | None) -> None:
    blocks, scales = weight.blocks, weight.scales
    if blocks.dim() != 4 or blocks.shape[-1] != GROUP // 2 or scales.shape != blocks.shape[:-1]:
        expected = f"[num_experts, out_features, groups, {GROUP // 2}] and the same without the last"
        raise ModelRefusedError(f"{name} is {list(blocks.shape)} and {list(scales.shape)}, in MXFP4 it were {expected}")
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ModelRefusedError(f"{name} is {blocks.dtype} and {scales.dtype}, in MXFP4 it were torch.uint8")
    if (scales > _LARGEST_SCALE).any():
        raise ModelRefusedError(
            f"{name} has weights that are not finite: a scale is {scales.max()}, and at most {_LARGEST_SCALE} is"
        )
    shape = list(weight.placeholder(torch.float32).shape)
    if parameter is None:
        raise ModelRefusedError(f"{name} is none of the model's weights")
    if shape != list(parameter.shape):
        raise ModelRefusedError(f"{name} is {shape} in the checkpoint and {list(parameter.shape)} in the model")
