"""Weights that stay in four bits as their checkpoint has them; they are never all dequantized at once.

These are linears of bitsandbytes (NF4), GPTQ, AWQ and compressed-tensors, including experts' linears that transformers
merges into one weight, and gpt-oss's experts in MXFP4.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, ClassVar, Protocol

import torch
from loraserve_kernels.backend import Backend
from loraserve_kernels.four_bit_weight import (
    LARGEST_NF4,
    FourBitWeight,
    dequantize_weight,
    have_one_order,
    joined,
    to_scales,
)
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
from loraserve.models.packed_weights import NF4_LEVELS, BlocksOfLevels, GroupsOfCodes, GroupsOfFloats, PackedWeight
from loraserve.models.quantized_checkpoint import MXFP4
from loraserve.models.unpacked_weights import are_unpacked, packed_weights, read_dequantized

_BLOCKS, _SCALES = "_blocks", "_scales"
_LARGEST_SCALE = 250
"""Largest exponent byte with which all elements stay finite, whatever they are rounded to."""
_EXPONENT_SHIFT = 23
"""Lowest bit of a float32's exponent."""
_Named = tuple[str, PackedWeight]
"""(name in the file, weight)."""


class StoredWeight(Protocol):
    """One parameter of the model, in the form that the checkpoint has it."""

    is_transposed: ClassVar[bool]
    """See `QuantizedParameter`."""

    @property
    def names_in_file(self) -> Collection[str]:
        """Names that it would have in an unquantized checkpoint."""
        ...

    @property
    def quantization(self) -> Quantization: ...

    def orders(self) -> Sequence[Tensor | None]:
        """Order of each matrix's inputs; see `FourBitWeight.order`."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""
        ...

    def four_bits(self) -> Sequence[FourBitWeight]:
        """One for a linear, or one per expert. Cached until `release_pages`, because startup requests them often."""
        ...

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The values that the checkpoint defines, dequantized."""
        ...

    def release_pages(self, mapped: MappedWeights) -> None:
        """Give back the memory mapped from the file, and that of `four_bits`."""
        ...


StoredWeights = Mapping[str, StoredWeight]
"""By the parameter's name in the model."""


def placeholder(weight: StoredWeight, dtype: torch.dtype) -> Tensor:
    """A tensor of the weight's shape, without memory for its elements."""
    return torch.empty((), dtype=dtype).expand(weight.shape)


def packed_bytes(weight: StoredWeight) -> int:
    """The weight's size in memory."""
    depth = weight.shape[-2 if weight.is_transposed else -1]
    return prod(weight.shape) // depth * weight.quantization.row_bytes(depth)


def rounded_as_packed(weight: StoredWeight, like: Tensor, backend: Backend, out: Tensor | None = None) -> Tensor:
    """The values that are multiplied with, dequantized. like: of their shape and dtype. out: reused and returned."""
    shape = like.mT.shape if weight.is_transposed else like.shape
    dense = like.new_empty(shape) if out is None else (out.mT if weight.is_transposed else out)
    for four_bits, matrix in zip(weight.four_bits(), dense.view(-1, *shape[-2:]), strict=True):
        backend.dequantize_weight(four_bits, matrix)
    return dense.mT if weight.is_transposed else dense


@dataclass(frozen=True)
class StoredMxfp4:
    """One projection of all experts of a layer, as gpt-oss stores it."""

    name: str
    blocks: Tensor
    """uint8 [num_experts, out_features, groups, GROUP / 2]: two elements per byte, the first in its lower bits."""
    exponents: Tensor
    """uint8 [num_experts, out_features, groups]: exponents of two, plus 127."""
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

    def orders(self) -> Sequence[Tensor | None]:
        return [None] * len(self.blocks)

    def four_bits(self) -> Sequence[FourBitWeight]:
        return self._four_bits

    @cached_property
    def _four_bits(self) -> Sequence[FourBitWeight]:
        scales = to_scales(_mxfp4_scales(self.exponents))
        return [
            FourBitWeight(Quantization.MXFP4, codes, of_codes)
            for codes, of_codes in zip(self.blocks.flatten(2), scales, strict=True)
        ]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return torch.stack(
            [dequantize_weight(each, torch.empty(each.shape, dtype=dtype)) for each in self._four_bits]
        ).mT

    def release_pages(self, mapped: MappedWeights) -> None:
        mapped.release_pages(self.blocks)
        mapped.release_pages(self.exponents)
        vars(self).pop("_four_bits", None)


@dataclass(frozen=True)
class StoredLinears:
    """One linear, or the linears of all experts that form one weight of the model."""

    matrices: Sequence[Sequence[_Named]]
    """For each matrix of the parameter, the weights whose outputs it consists of, in order."""
    quantization: Quantization
    shape: tuple[int, ...]
    is_transposed: ClassVar = False

    @property
    def names_in_file(self) -> Collection[str]:
        return [name for matrix in self.matrices for name, _ in matrix]

    def orders(self) -> Sequence[Tensor | None]:
        return [_order(first) for (_, first), *_ in self.matrices]

    def four_bits(self) -> Sequence[FourBitWeight]:
        return self._four_bits

    @cached_property
    def _four_bits(self) -> Sequence[FourBitWeight]:
        return [joined([_in_four_bits(weight, self.quantization) for _, weight in matrix]) for matrix in self.matrices]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        weights = [weight for matrix in self.matrices for _, weight in matrix]
        whole = torch.empty(self.shape, dtype=dtype)
        rows = whole.flatten(0, -2).split([weight.shape[0] for weight in weights])
        for target, weight in zip(rows, weights, strict=True):
            target.copy_(weight.dequantize())
        return whole

    def release_pages(self, mapped: MappedWeights) -> None:
        for matrix in self.matrices:
            for _, weight in matrix:
                mapped.release_pages(weight.packed)
        vars(self).pop("_four_bits", None)


def _mxfp4_scales(exponents: Tensor) -> Tensor:
    """Scales for elements doubled to integers, infinite if elements would be. exponents: uint8, of two, plus 127."""
    # As a float32, 2^(e - 128) has the exponent bits e - 1; below the normal range it becomes zero.
    scales = ((exponents.int() - 1).clamp_min_(0) << _EXPONENT_SHIFT).view(torch.float32)
    return torch.where(exponents > _LARGEST_SCALE, torch.inf, scales)


def find_stored(
    model: str, revision: str | None, stored: dict[str, Any], bare: PreTrainedModel, dtype: torch.dtype
) -> StoredWeights:
    """Weights that can stay in four bits. stored: the checkpoint's `quantization_config`. bare: the model in `dtype`,
    without weights.

    Raises `ModelRefusedError`.
    """
    if stored["quant_method"] == MXFP4:
        return _find_experts(model, revision, dict(bare.named_parameters()))
    if are_unpacked(stored):
        return _find_linears(packed_weights(model, revision, stored), bare, dtype)
    return {}


def read_others(
    model: str, revision: str | None, quantization_config: dict[str, Any], dtype: torch.dtype, stored: StoredWeights
) -> dict[str, Tensor]:
    """All tensors of the checkpoint by name, with placeholders for the stored weights, of which there is at least one.

    Raises `ModelRefusedError`.
    """
    placeholders = {name_to_load(name, weight): placeholder(weight, dtype) for name, weight in stored.items()}
    if are_unpacked(quantization_config):
        left_out = {name for weight in stored.values() for name in weight.names_in_file}
        return read_dequantized(model, revision, quantization_config, dtype, left_out) | placeholders
    parts = {name + part for name in stored for part in (_BLOCKS, _SCALES)}
    tensors: dict[str, Tensor] = {}
    for path in weight_files(model, revision):
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if name not in parts]  # noqa: SIM118, an open file is not a mapping
            tensors |= {name: file.get_tensor(name) for name in names}
    return tensors | placeholders


def name_to_load(name: str, weight: StoredWeight) -> str:
    """The name under which transformers gets the placeholder. name: the parameter's."""
    (first, *_) = weight.names_in_file
    return first if len(weight.shape) == 2 else name  # experts load as if already merged


def _find_experts(model: str, revision: str | None, parameters: Mapping[str, Tensor]) -> dict[str, StoredMxfp4]:
    """parameters: the model's; their values are not read."""
    tensors: dict[str, Tensor] = {}
    for path in weight_files(model, revision):
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if name.endswith((_BLOCKS, _SCALES))]  # noqa: SIM118, an open file is not a mapping
            tensors |= {name: file.get_tensor(name) for name in names}
    found: dict[str, StoredMxfp4] = {}
    for name in [name.removesuffix(_BLOCKS) for name in tensors if name.endswith(_BLOCKS)]:
        found[name] = StoredMxfp4(name, tensors[name + _BLOCKS], tensors[name + _SCALES])
        _check(name, found[name], parameters.get(name))
    return found


def _check(name: str, weight: StoredMxfp4, parameter: Tensor | None) -> None:
    blocks, exponents = weight.blocks, weight.exponents
    if blocks.dim() != 4 or blocks.shape[-1] != GROUP // 2 or exponents.shape != blocks.shape[:-1]:
        expected = f"[num_experts, out_features, groups, {GROUP // 2}] and the same without the last dimension"
        found = f"{list(blocks.shape)} and {list(exponents.shape)}"
        raise ModelRefusedError(f"{name} has the shapes {found}, but MXFP4 requires {expected}")
    if blocks.dtype != torch.uint8 or exponents.dtype != torch.uint8:
        raise ModelRefusedError(f"{name} is {blocks.dtype} and {exponents.dtype}, but MXFP4 requires torch.uint8")
    if (exponents > _LARGEST_SCALE).any():
        raise ModelRefusedError(
            f"{name} has non-finite weights: a scale exponent is {exponents.max()}, above the limit of {_LARGEST_SCALE}"
        )
    if parameter is None:
        raise ModelRefusedError(f"{name} is not one of the model's weights")
    if weight.shape != tuple(parameter.shape):
        shapes = f"{list(weight.shape)} in the checkpoint but {list(parameter.shape)} in the model"
        raise ModelRefusedError(f"{name} has shape {shapes}")


def _find_linears(
    packed: Mapping[str, PackedWeight], bare: PreTrainedModel, dtype: torch.dtype
) -> dict[str, StoredLinears]:
    """packed: by module name in the file."""
    place_of = _places(bare)
    parts_of = defaultdict[str, defaultdict[int, list[_Named]]](lambda: defaultdict(list))
    for module, weight in packed.items():
        name_in_file = f"{module}.weight"
        if (place := place_of(name_in_file)) is not None:
            name, part = place
            parts_of[name][part].append((name_in_file, weight))
    found: dict[str, StoredLinears] = {}
    for name, parameter in _candidates(bare, dtype):
        parts = [parts_of[name][part] for part in sorted(parts_of[name])] if name in parts_of else []
        can_load = parameter.dim() == 2 or place_of(name) == (name, 0)  # see `name_to_load`
        if can_load and (weight := _assemble(parts, tuple(parameter.shape))) is not None:
            found[name] = weight
    return found


def _candidates(bare: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Weights of linears and of experts that will be in the model's dtype."""
    head = bare.get_output_embeddings()
    linears = {
        f"{name}.weight"
        for name, module in bare.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    in_float32 = {*(bare._keep_in_fp32_modules or ()), *(bare._keep_in_fp32_modules_strict or ())}
    for name, parameter in bare.named_parameters():
        is_cast = parameter.dtype != dtype or any(part in name for part in in_float32)
        if (name in linears or parameter.dim() > 2) and not is_cast:
            yield name, parameter


def _assemble(parts: Sequence[list[_Named]], shape: tuple[int, ...]) -> StoredLinears | None:
    """None if not all of the weights can stay, or if they do not make up the whole parameter.

    parts: ordered by their outputs within a matrix; each part lists its weight of every matrix, in any order.
    shape: the parameter's.
    """
    weights = [weight for of_part in parts for _, weight in of_part]
    forms = {_form(weight) for weight in weights}
    form = forms.pop() if len(forms) == 1 else None
    if form is None or any(weight.shape[1] != shape[-1] for weight in weights) or len({*map(len, parts)}) != 1:
        return None
    in_order = [sorted(of_part, key=lambda named: dot_natural_key(named[0])) for of_part in parts]
    matrices = [*zip(*in_order, strict=True)]
    num_outputs = {sum(weight.shape[0] for _, weight in matrix) for matrix in matrices}
    if num_outputs != {shape[-2]} or len(matrices) != prod(shape[:-2]):
        return None
    if not all(have_one_order([_order(weight) for _, weight in matrix]) for matrix in matrices):
        return None
    for name, weight in (named for of_part in parts for named in of_part):
        if not _scales(weight).isfinite().all():
            raise ModelRefusedError(f"{name} has non-finite weights, because some of its scales are not finite")
    return StoredLinears(matrices, form, shape)


def _places(bare: PreTrainedModel) -> Callable[[str], tuple[str, int] | None]:
    """Maps a name in the file to the parameter that transformers makes of it, and to its part's index within a matrix.

    The result is None if transformers does anything other than rename it or merge experts' linears.
    """
    transforms = get_model_conversion_mapping(bare)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    prefix, weights = bare.base_model_prefix, bare.state_dict()

    def place(name: str) -> tuple[str, int] | None:
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, weights)
        if pattern is None:
            return renamed, 0
        converter = of_pattern[pattern]
        merge, *others = converter.operations
        is_merge = isinstance(merge, MergeModulelist) and merge.dim == 0
        is_known = not others or (len(others) == 1 and isinstance(others[0], Concatenate) and others[0].dim == 1)
        return (renamed, converter.source_patterns.index(pattern)) if is_merge and is_known else None

    return place


def _form(weight: PackedWeight) -> Quantization | None:
    """The four-bit form that it can stay in, if any."""
    if isinstance(weight, BlocksOfLevels):
        is_nf4 = weight.block_size == NF4_BLOCK and torch.equal(weight.levels, NF4_LEVELS)
        return Quantization.NF4 if is_nf4 and weight.shape[1] % NF4_BLOCK == 0 else None
    if isinstance(weight, GroupsOfFloats):
        return Quantization.MXFP4
    if isinstance(weight, GroupsOfCodes) and weight.bits == 4 and weight.has_full_groups:
        return _form_of_groups(weight)
    return None


def _order(weight: PackedWeight) -> Tensor | None:
    return weight.order if isinstance(weight, GroupsOfCodes) else None


def _scales(weight: PackedWeight) -> Tensor:
    """Scales of a weight that can stay."""
    if isinstance(weight, BlocksOfLevels):
        return weight.largest() / LARGEST_NF4
    if isinstance(weight, GroupsOfFloats):
        return _mxfp4_scales(weight.exponents)
    assert isinstance(weight, GroupsOfCodes)
    return weight.scales


def _form_of_groups(weight: GroupsOfCodes) -> Quantization | None:
    """The form with the largest groups that evenly divide the weight's groups."""
    depth = weight.shape[1]
    for form in (Quantization.UINT4_G128, Quantization.UINT4):
        size = form.group_size(depth)
        if depth % size == 0 and (weight.group_size % size == 0 or weight.group_size == depth):
            return form
    return None


def _in_four_bits(weight: PackedWeight, form: Quantization) -> FourBitWeight:
    num_outputs, depth = weight.shape
    scales, size = to_scales(_scales(weight)), form.group_size(depth)
    if isinstance(weight, BlocksOfLevels):
        scales = scales.view(num_outputs, -1).repeat_interleave(NF4_BLOCK // size, 1)
        codes = (weight.packed >> 4 | weight.packed << 4).view(num_outputs, -1)
        return FourBitWeight(form, codes, scales)
    if isinstance(weight, GroupsOfFloats):
        return FourBitWeight(form, weight.packed, scales)
    assert isinstance(weight, GroupsOfCodes)
    scales, zeros = (
        each.T.repeat_interleave(weight.group_size // size, 1)[:, : depth // size].contiguous()
        for each in (scales, weight.zeros)
    )
    return FourBitWeight(form, weight.layout.in_pairs(weight.packed), scales, zeros, weight.order)
