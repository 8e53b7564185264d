"""Weights that stay as their checkpoint has them, in four bits: never are all of them whole.

Linears of bitsandbytes (NF4), GPTQ, AWQ and compressed-tensors, also those that transformers makes one weight of for
all experts, and gpt-oss's experts in MXFP4.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, ClassVar, Protocol

import torch
from loraserve_kernels.backend import Backend
from loraserve_kernels.four_bit_weight import LARGEST_NF4, FourBitWeight, joined, to_scales, whole_weight
from loraserve_kernels.quantization import GROUP, NF4_BLOCK, Quantization
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from loraserve.models.errors import ModelRefusedError
from loraserve.models.mapped_weights import MappedWeights
from loraserve.models.model_files import weight_files
from loraserve.models.packed_weights import NF4_LEVELS, BlocksOfLevels, GroupsOfCodes, PackedWeight
from loraserve.models.quantized_checkpoint import MXFP4
from loraserve.models.unpacked_weights import are_unpacked, packed_weights, read_whole

_BLOCKS, _SCALES = "_blocks", "_scales"
_LARGEST_SCALE = 250
"""Of which all elements are finite, whatever they are rounded to."""
_EXPONENT_SHIFT = 23
"""Of float32."""
_Matrix = tuple[Any, ...]
"""What matrices of one parameter are ordered by."""
_Parts = dict[tuple[_Matrix, int], tuple[str, PackedWeight]]
"""Of a parameter: names in the file and weights by their matrix, and by which part of that they are."""


class StoredWeight(Protocol):
    """What one parameter of the model is in the checkpoint."""

    is_transposed: ClassVar[bool]
    """See `QuantizedParameter`."""

    @property
    def names_in_file(self) -> Collection[str]:
        """Under which the checkpoint would have it whole."""
        ...

    @property
    def quantization(self) -> Quantization: ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameter."""
        ...

    def four_bits(self) -> Sequence[FourBitWeight]:
        """Of a linear, or of each expert. Made once, until `give_back`, as a start asks often."""
        ...

    def whole(self, dtype: torch.dtype) -> Tensor:
        """What the checkpoint says it is."""
        ...

    def give_back(self, mapped: MappedWeights) -> None:
        """The memory of what is mapped from the file, and of `four_bits`."""
        ...


StoredWeights = Mapping[str, StoredWeight]
"""By the name of the parameter in the model."""


def placeholder(weight: StoredWeight, dtype: torch.dtype) -> Tensor:
    """Of the weight's shape, and without memory."""
    return torch.empty((), dtype=dtype).expand(weight.shape)


def packed_bytes(weight: StoredWeight) -> int:
    """In memory."""
    depth = weight.shape[-2 if weight.is_transposed else -1]
    return prod(weight.shape) // depth * weight.quantization.row_bytes(depth)


def rounded_as_packed(weight: StoredWeight, like: Tensor, backend: Backend, out: Tensor | None = None) -> Tensor:
    """What is multiplied with, whole. like: of its shape and dtype. out: one made before, which is returned."""
    shape = like.mT.shape if weight.is_transposed else like.shape
    dense = like.new_empty(shape) if out is None else (out.mT if weight.is_transposed else out)
    for four_bits, matrix in zip(weight.four_bits(), dense.view(-1, *shape[-2:]), strict=True):
        backend.whole_weight(four_bits, matrix)
    return dense.mT if weight.is_transposed else dense


@dataclass(frozen=True)
class StoredMxfp4:
    """One projection of all experts of a layer, as gpt-oss has them."""

    name: str
    blocks: Tensor
    """uint8 [num_experts, out_features, groups, GROUP / 2], elements two in a byte, the first in its lower bits."""
    exponents: Tensor
    """uint8 [num_experts, out_features, groups], of two, over -127."""
    is_transposed: ClassVar = True

    @property
    def names_in_file(self) -> Collection[str]:
        return (self.name,)

    @property
    def quantization(self) -> Quantization:
        return Quantization.MXFP4

    @property
    def shape(self) -> tuple[int, ...]:
        num_experts, out_features, groups, _ = self.blocks.shape
        return num_experts, groups * GROUP, out_features

    def four_bits(self) -> Sequence[FourBitWeight]:
        return self._four_bits

    @cached_property
    def _four_bits(self) -> Sequence[FourBitWeight]:
        # Of half an element, zero below the normal range: 2^(e - 128) has e - 1 where a float has its exponent.
        scales = ((self.exponents.int() - 1).clamp_min_(0) << _EXPONENT_SHIFT).view(torch.float32).bfloat16()
        return [
            FourBitWeight(Quantization.MXFP4, codes, of_codes)
            for codes, of_codes in zip(self.blocks.flatten(2), scales, strict=True)
        ]

    def whole(self, dtype: torch.dtype) -> Tensor:
        return torch.stack([whole_weight(each, torch.empty(each.shape, dtype=dtype)) for each in self._four_bits]).mT

    def give_back(self, mapped: MappedWeights) -> None:
        mapped.give_back(self.blocks)
        mapped.give_back(self.exponents)
        vars(self).pop("_four_bits", None)


@dataclass(frozen=True)
class StoredLinears:
    """One linear, or those of all experts, which are one weight of the model."""

    matrices: Sequence[Sequence[tuple[str, PackedWeight]]]
    """Names in the file and weights: of each matrix of the parameter those whose outputs it has, in their order."""
    quantization: Quantization
    shape: tuple[int, ...]
    is_transposed: ClassVar = False

    @property
    def names_in_file(self) -> Collection[str]:
        return [name for matrix in self.matrices for name, _ in matrix]

    def four_bits(self) -> Sequence[FourBitWeight]:
        return self._four_bits

    @cached_property
    def _four_bits(self) -> Sequence[FourBitWeight]:
        return [joined([_in_four_bits(weight) for _, weight in matrix]) for matrix in self.matrices]

    def whole(self, dtype: torch.dtype) -> Tensor:
        whole = torch.cat([weight.whole().to(dtype) for matrix in self.matrices for _, weight in matrix])
        return whole.view(self.shape)

    def give_back(self, mapped: MappedWeights) -> None:
        for matrix in self.matrices:
            for _, weight in matrix:
                mapped.give_back(weight.packed)
        vars(self).pop("_four_bits", None)


def find_stored(model: str, revision: str | None, stored: dict[str, Any], bare: PreTrainedModel) -> StoredWeights:
    """What can stay as it is. stored: the checkpoint's `quantization_config`. bare: the model without values.

    Raises `ModelRefusedError`.
    """
    if stored["quant_method"] == MXFP4:
        return _find_experts(model, revision, dict(bare.named_parameters()))
    if are_unpacked(stored):
        return _find_linears(packed_weights(model, revision, stored), bare)
    return {}


def read_others(
    model: str, revision: str | None, quantization_config: dict[str, Any], dtype: torch.dtype, stored: StoredWeights
) -> dict[str, Tensor]:
    """All tensors of the checkpoint by name, with placeholders for the stored weights, of which there are some.

    Raises `ModelRefusedError`.
    """
    placeholders = {name_to_load(name, weight): placeholder(weight, dtype) for name, weight in stored.items()}
    if are_unpacked(quantization_config):
        left_out = {name for weight in stored.values() for name in weight.names_in_file}
        return read_whole(model, revision, quantization_config, dtype, left_out) | placeholders
    parts = {name + part for name in stored for part in (_BLOCKS, _SCALES)}
    tensors: dict[str, Tensor] = {}
    for path in weight_files(model, revision):
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if name not in parts]  # noqa: SIM118, a file is no mapping
            tensors |= {name: file.get_tensor(name) for name in names}
    return tensors | placeholders


def name_to_load(name: str, weight: StoredWeight) -> str:
    """Under which transformers is given the placeholder. name: of the parameter."""
    (first, *_) = weight.names_in_file
    return first if len(weight.shape) == 2 else name  # of experts, as if they had been put together


def _find_experts(model: str, revision: str | None, parameters: Mapping[str, Tensor]) -> dict[str, StoredMxfp4]:
    """parameters: of the model, whose values are not looked at."""
    tensors: dict[str, Tensor] = {}
    for path in weight_files(model, revision):
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if name.endswith((_BLOCKS, _SCALES))]  # noqa: SIM118, likewise
            tensors |= {name: file.get_tensor(name) for name in names}
    found: dict[str, StoredMxfp4] = {}
    for name in [name.removesuffix(_BLOCKS) for name in tensors if name.endswith(_BLOCKS)]:
        found[name] = StoredMxfp4(name, tensors[name + _BLOCKS], tensors[name + _SCALES])
        _check(name, found[name], parameters.get(name))
    return found


def _check(name: str, weight: StoredMxfp4, parameter: Tensor | None) -> None:
    blocks, exponents = weight.blocks, weight.exponents
    if blocks.dim() != 4 or blocks.shape[-1] != GROUP // 2 or exponents.shape != blocks.shape[:-1]:
        expected = f"[num_experts, out_features, groups, {GROUP // 2}] and the same without the last"
        found = f"{list(blocks.shape)} and {list(exponents.shape)}"
        raise ModelRefusedError(f"{name} is {found}, in MXFP4 it were {expected}")
    if blocks.dtype != torch.uint8 or exponents.dtype != torch.uint8:
        raise ModelRefusedError(f"{name} is {blocks.dtype} and {exponents.dtype}, in MXFP4 it were torch.uint8")
    if (exponents > _LARGEST_SCALE).any():
        raise ModelRefusedError(
            f"{name} has weights that are not finite: a scale is {exponents.max()}, and at most {_LARGEST_SCALE} is"
        )
    if parameter is None:
        raise ModelRefusedError(f"{name} is none of the model's weights")
    if weight.shape != tuple(parameter.shape):
        shapes = f"{list(weight.shape)} in the checkpoint and {list(parameter.shape)} in the model"
        raise ModelRefusedError(f"{name} is {shapes}")


def _find_linears(packed: Mapping[str, PackedWeight], bare: PreTrainedModel) -> dict[str, StoredLinears]:
    """packed: by the names of modules in the file."""
    head = bare.get_output_embeddings()
    linears = {
        f"{name}.weight"
        for name, module in bare.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    place_of, parts_of = _places(bare), defaultdict[str, _Parts](dict)
    for module, weight in packed.items():
        name_in_file = f"{module}.weight"
        name, matrix, part = place_of(name_in_file)
        parts_of[name][matrix, part] = name_in_file, weight
    found: dict[str, StoredLinears] = {}
    for name, parameter in bare.named_parameters():
        weight = _put_together(parts_of[name], tuple(parameter.shape))
        can_load = name in linears or (parameter.dim() > 2 and place_of(name)[0] == name)  # see `name_to_load`
        if weight is not None and can_load:
            found[name] = weight
    return found


def _put_together(parts: _Parts, shape: tuple[int, ...]) -> StoredLinears | None:
    """None = not all can stay, or they are not all of the parameter, whose shape is given."""
    forms = {_form(name, weight) for name, weight in parts.values()}
    form = forms.pop() if len(forms) == 1 else None
    if form is None or any(weight.shape[1] != shape[-1] for _, weight in parts.values()):
        return None
    matrices = defaultdict[_Matrix, list[tuple[str, PackedWeight]]](list)
    for matrix, part in sorted(parts):
        matrices[matrix].append(parts[matrix, part])
    num_outputs = {sum(weight.shape[0] for _, weight in matrix) for matrix in matrices.values()}
    if num_outputs != {shape[-2]} or len(matrices) != prod(shape[:-2]):
        return None
    return StoredLinears([*matrices.values()], form, shape)


def _places(bare: PreTrainedModel) -> Callable[[str], tuple[str, _Matrix, int]]:
    """Of a name in the file: of which parameter it becomes a part, of which of its matrices, and which part of that.

    As transformers does it; "" where that is something else than putting experts' linears together.
    """
    transforms = get_model_conversion_mapping(bare)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    prefix, weights = bare.base_model_prefix, bare.state_dict()

    def place(name: str) -> tuple[str, _Matrix, int]:
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, weights)
        if pattern is None:
            return renamed, (), 0
        converter = of_pattern[pattern]
        merge, *others = converter.operations
        is_merge = isinstance(merge, MergeModulelist) and merge.dim == 0
        is_known = not others or (len(others) == 1 and isinstance(others[0], Concatenate) and others[0].dim == 1)
        if not is_merge or not is_known:
            return "", (), 0
        expert = name.removesuffix(".weight").rpartition(".")[0]
        return renamed, tuple(dot_natural_key(expert)), converter.source_patterns.index(pattern)

    return place


def _form(name: str, weight: PackedWeight) -> Quantization | None:
    """What it can stay in. Raises `ModelRefusedError`."""
    if isinstance(weight, BlocksOfLevels):
        is_nf4 = weight.block_size == NF4_BLOCK and torch.equal(weight.levels, NF4_LEVELS)
        form, scales, fits = Quantization.NF4, weight.largest(), is_nf4 and weight.shape[1] % NF4_BLOCK == 0
    elif isinstance(weight, GroupsOfCodes) and weight.bits == 4:
        form, scales = _form_of_groups(weight), weight.scales
        fits = weight.is_in_order
    else:
        return None
    if not scales.isfinite().all():
        raise ModelRefusedError(f"{name} has weights that are not finite")
    return form if fits else None


def _form_of_groups(weight: GroupsOfCodes) -> Quantization | None:
    """That of the largest groups which those of the weight are made of."""
    depth = weight.shape[1]
    for form in (Quantization.UINT4_G128, Quantization.UINT4):
        size = form.group_size(depth)
        if depth % size == 0 and (weight.group_size % size == 0 or weight.group_size == depth):
            return form
    return None


def _in_four_bits(weight: PackedWeight) -> FourBitWeight:
    if isinstance(weight, BlocksOfLevels):
        num_outputs = weight.shape[0]
        scales = (
            to_scales(weight.largest() / LARGEST_NF4).view(num_outputs, -1).repeat_interleave(NF4_BLOCK // GROUP, 1)
        )
        codes = (weight.packed >> 4 | weight.packed << 4).view(num_outputs, -1)
        return FourBitWeight(Quantization.NF4, codes, scales)
    assert isinstance(weight, GroupsOfCodes)
    form = _form_of_groups(weight)
    assert form is not None, "it stays as it is"
    size = form.group_size(weight.shape[1])
    scales, zeros = (
        each.T.repeat_interleave(weight.group_size // size, 1)[:, : weight.shape[1] // size].contiguous()
        for each in (to_scales(weight.scales), weight.zeros)
    )
    return FourBitWeight(form, weight.in_pairs(), scales, zeros)
