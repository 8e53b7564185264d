"""Weights that stay as their checkpoint has them, in four bits: never are all of them whole.

Experts in MXFP4, as gpt-oss's, of which nothing is lost, and linears in NF4, as bitsandbytes has them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from loraserve_kernels.backend import Backend
from loraserve_kernels.nf4 import LEVELS, PACKED_LEVELS
from loraserve_kernels.quantization import GROUP, NF4_BLOCK, Quantization
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from loraserve.models.errors import ModelRefusedError
from loraserve.models.mapped_weights import MappedWeights
from loraserve.models.model_files import weight_files
from loraserve.models.quantized_checkpoint import MXFP4
from loraserve.models.unpacked_weights import BITSANDBYTES, FourBits, four_bit_weights, read_whole

_BLOCKS, _SCALES = "_blocks", "_scales"
_LARGEST_SCALE = 250
"""Of which all elements are finite, whatever they are rounded to."""
_TWO_ZEROS = 0x77
"""A byte of codes in NF4."""
_SMALLEST = 2.0**-115
"""Largest of a block whose multiples are not rounded to 0."""


class StoredWeight(Protocol):
    """Mapped from the file."""

    @property
    def name_in_file(self) -> str:
        """Under which the checkpoint would have it whole."""
        ...

    quantization: ClassVar[Quantization]
    """What its linear or its experts are packed in."""
    is_transposed: ClassVar[bool]
    """See `QuantizedParameter`."""

    def placeholder(self, dtype: torch.dtype) -> Tensor:
        """Of the weight's shape in the model, and without memory."""
        ...

    def whole(self, like: Tensor, backend: Backend) -> Tensor:
        """Of the placeholder's shape and dtype."""
        ...

    def rounded(self, like: Tensor, backend: Backend, out: Tensor | None = None) -> Tensor:
        """The same as it is packed. out: one that was made before, which is overwritten and returned."""
        ...

    def give_back(self, mapped: MappedWeights) -> None: ...


StoredWeights = Mapping[str, StoredWeight]
"""By the name of the parameter in the model."""


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """One projection of all experts of a layer, as `whole_mxfp4` takes it."""

    name_in_file: str
    blocks: Tensor
    """[num_experts, out_features, groups, GROUP / 2]."""
    scales: Tensor
    quantization: ClassVar = Quantization.MXFP4
    is_transposed: ClassVar = True

    def placeholder(self, dtype: torch.dtype) -> Tensor:
        """[num_experts, in_features, out_features]."""
        num_experts, out_features, groups, _ = self.blocks.shape
        return torch.empty((), dtype=dtype).expand(num_experts, groups * GROUP, out_features)

    def whole(self, like: Tensor, backend: Backend) -> Tensor:
        return self.rounded(like, backend)

    def rounded(self, like: Tensor, backend: Backend, out: Tensor | None = None) -> Tensor:
        """Nothing is rounded."""
        num_experts, in_features, out_features = like.shape
        dense = like.new_empty(num_experts, out_features, in_features) if out is None else out.mT
        return backend.whole_mxfp4(self.blocks, self.scales, dense).mT

    def give_back(self, mapped: MappedWeights) -> None:
        mapped.give_back(self.blocks)
        mapped.give_back(self.scales)


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """One linear, as `whole_nf4` takes it."""

    name_in_file: str
    bits: FourBits
    quantization: ClassVar = Quantization.NF4
    is_transposed: ClassVar = False

    def placeholder(self, dtype: torch.dtype) -> Tensor:
        """[out_features, in_features]."""
        return torch.empty((), dtype=dtype).expand(self.bits.shape)

    def whole(self, like: Tensor, backend: Backend) -> Tensor:
        whole = torch.empty(like.shape, dtype=self.bits.dtype)
        return backend.whole_nf4(self._codes, self._in_blocks(self.bits.largest()), LEVELS, whole).to(like.dtype)

    def rounded(self, like: Tensor, backend: Backend, out: Tensor | None = None) -> Tensor:
        """As `rounded_weight` makes it of the whole one."""
        largest = self.bits.largest().to(self.bits.dtype).to(like.dtype).bfloat16().float()
        largest[largest < _SMALLEST] = 0
        rounded = like.new_empty(like.shape) if out is None else out
        return backend.whole_nf4(self._codes, self._in_blocks(largest), PACKED_LEVELS, rounded)

    @property
    def _codes(self) -> Tensor:
        return self.bits.codes.view(self.bits.shape[0], -1, NF4_BLOCK // 2)

    def _in_blocks(self, largest: Tensor) -> Tensor:
        return largest.view(self.bits.shape[0], -1)

    def give_back(self, mapped: MappedWeights) -> None:
        mapped.give_back(self.bits.codes)


def find_stored(model: str, revision: str | None, stored: dict[str, Any], bare: PreTrainedModel) -> StoredWeights:
    """What can stay as it is. stored: the checkpoint's `quantization_config`. bare: the model without values.

    Raises `ModelRefusedError`.
    """
    if stored["quant_method"] == MXFP4:
        return _find_experts(model, revision, dict(bare.named_parameters()))
    if stored["quant_method"] == BITSANDBYTES:
        return _find_linears(model, revision, stored, bare)
    return {}


def read_others(
    model: str, revision: str | None, quantization_config: dict[str, Any], dtype: torch.dtype, stored: StoredWeights
) -> dict[str, Tensor]:
    """All tensors of the checkpoint by name, with placeholders for the stored weights, of which there are some.

    Raises `ModelRefusedError`.
    """
    placeholders = {weight.name_in_file: weight.placeholder(dtype) for weight in stored.values()}
    if quantization_config["quant_method"] == BITSANDBYTES:
        return read_whole(model, revision, quantization_config, dtype, placeholders)
    parts = {name + part for name in stored for part in (_BLOCKS, _SCALES)}
    tensors: dict[str, Tensor] = {}
    for path in weight_files(model, revision):
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if name not in parts]  # noqa: SIM118, a file is no mapping
            tensors |= {name: file.get_tensor(name) for name in names}
    return tensors | placeholders


def _find_experts(model: str, revision: str | None, parameters: Mapping[str, Tensor]) -> dict[str, StoredExperts]:
    """parameters: of the model, whose values are not looked at."""
    tensors: dict[str, Tensor] = {}
    for path in weight_files(model, revision):
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if name.endswith((_BLOCKS, _SCALES))]  # noqa: SIM118, likewise
            tensors |= {name: file.get_tensor(name) for name in names}
    found: dict[str, StoredExperts] = {}
    for name in [name.removesuffix(_BLOCKS) for name in tensors if name.endswith(_BLOCKS)]:
        found[name] = StoredExperts(name, tensors[name + _BLOCKS], tensors[name + _SCALES])
        _check(name, found[name], parameters.get(name))
    return found


def _check(name: str, weight: StoredExperts, parameter: Tensor | None) -> None:
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


def _find_linears(
    model: str, revision: str | None, stored: dict[str, Any], bare: PreTrainedModel
) -> dict[str, StoredLinear]:
    head = bare.get_output_embeddings()
    shapes = {
        f"{name}.weight": tuple(module.weight.shape)
        for name, module in bare.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    rename, found = _renaming(bare), {}
    for module, bits in four_bit_weights(model, revision, stored).items():
        name_in_file = f"{module}.weight"
        name = rename(name_in_file)
        if shapes.get(name) == bits.shape and _is_nf4(name, bits):
            found[name] = StoredLinear(name_in_file, bits)
    return found


def _renaming(bare: PreTrainedModel) -> Callable[[str], str]:
    """From names in files to those in the model, as transformers does it; "" where it makes one weight of several."""
    transforms = get_model_conversion_mapping(bare)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    prefix, weights = bare.base_model_prefix, bare.state_dict()

    def rename(name: str) -> str:
        renamed, converted_from = rename_source_key(name, renamings, converters, prefix, weights)
        return renamed if converted_from is None else ""

    return rename


def _is_nf4(name: str, bits: FourBits) -> bool:
    """In blocks that no two rows share, whose codes come back from their weights. Raises `ModelRefusedError`."""
    if bits.block_size != NF4_BLOCK or bits.shape[1] % NF4_BLOCK != 0 or not torch.equal(bits.levels, LEVELS):
        return False
    largest, codes = bits.largest(), bits.codes.view(-1, NF4_BLOCK // 2)
    if not largest.isfinite().all():
        raise ModelRefusedError(f"{name} has weights that are not finite")
    # 0 or 15, in the upper four bits or the lower ones.
    has_largest = ((codes + 16 & 0xE0) == 0).logical_or_((codes + 1 & 0x0E) == 0).any(1)
    is_zero = (largest == 0) | (codes == _TWO_ZEROS).all(1)
    # What is largest may be below zero where that was rounded to eight bits, beside much larger ones.
    return bool((is_zero | (has_largest & (largest > 0))).all())
