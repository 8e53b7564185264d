"""Weights that stay as their checkpoint has them, in four bits: never are all of them whole.

Experts in MXFP4, as gpt-oss's, of which nothing is lost, and linears in NF4, as bitsandbytes has them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from loraserve_kernels.backend import Backend
from loraserve_kernels.nf4 import BLOCK, LEVELS, PACKED_LEVELS
from loraserve_kernels.quantization import GROUP, Quantization
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from loraserve.models.errors import ModelRefusedError
from loraserve.models.mapped_weights import MappedWeights
from loraserve.models.model_files import weight_files
from loraserve.models.quantized_checkpoint import MXFP4, stored_tensors
from loraserve.models.unpacked_weights import BITSANDBYTES, FourBits, four_bit_weights, read_whole

_BLOCKS, _SCALES = "_blocks", "_scales"
_LARGEST_SCALE = 250
"""Of which all elements are finite, whatever they are rounded to."""
_SMALLEST = 2.0**-115
"""Largest of a block whose multiples are not rounded to 0."""


class StoredWeight(Protocol):
    """Mapped from the file."""

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
        return self.bits.codes.view(self.bits.shape[0], -1, BLOCK // 2)

    def _in_blocks(self, largest: Tensor) -> Tensor:
        return largest.view(self.bits.shape[0], -1)

    def give_back(self, mapped: MappedWeights) -> None:
        mapped.give_back(self.bits.codes)


def read_experts(
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
        weight = StoredExperts(tensors.pop(name + _BLOCKS), tensors.pop(name + _SCALES))
        _check(name, weight, parameters.get(name))
        stored[name], tensors[name] = weight, weight.placeholder(dtype)
    return tensors, stored


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


def read_linears(
    model: str, revision: str | None, stored: dict[str, Any], dtype: torch.dtype, bare: PreTrainedModel
) -> tuple[dict[str, Tensor], StoredWeights]:
    """The same of a checkpoint of bitsandbytes; weights that are not in NF4 are whole. stored: see `read_whole`. bare:
    the model without values."""
    kept = _kept_linears(model, revision, stored, bare)
    placeholders = {name: weight.placeholder(dtype) for name, weight in kept.items()}
    return read_whole(model, revision, stored, dtype, placeholders), kept


def forms_of_stored(
    model: str, revision: str | None, stored: dict[str, Any] | None, bare: PreTrainedModel
) -> dict[str, Quantization]:
    """Of the weights that stay as they are where any do, by their names. stored, bare: see `read_linears`.

    Raises `ModelRefusedError`.
    """
    method = None if stored is None else stored["quant_method"]
    if method == MXFP4:
        names = stored_tensors(model, revision)
        return {name.removesuffix(_BLOCKS): Quantization.MXFP4 for name in names if name.endswith(_BLOCKS)}
    if stored is None or method != BITSANDBYTES:
        return {}
    return dict.fromkeys(_kept_linears(model, revision, stored, bare), Quantization.NF4)


def _kept_linears(
    model: str, revision: str | None, stored: dict[str, Any], bare: PreTrainedModel
) -> dict[str, StoredLinear]:
    head = bare.get_output_embeddings()
    shapes = {
        name: tuple(module.weight.shape)
        for name, module in bare.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    return {
        f"{name}.weight": StoredLinear(bits)
        for name, bits in four_bit_weights(model, revision, stored).items()
        if shapes.get(name) == bits.shape and _is_nf4(f"{name}.weight", bits)
    }


def _is_nf4(name: str, bits: FourBits) -> bool:
    """In blocks that no two rows share, each with a weight that is its largest. Raises `ModelRefusedError`."""
    if bits.block_size != BLOCK or bits.shape[1] % BLOCK != 0 or not torch.equal(bits.levels, LEVELS):
        return False
    largest, codes = bits.largest(), bits.codes.view(-1, BLOCK // 2)
    if not largest.isfinite().all():
        raise ModelRefusedError(f"{name} has weights that are not finite")
    # 0 or 15, in the upper four bits or the lower ones.
    has_largest = ((codes + 16 & 0xE0) == 0).logical_or_((codes + 1 & 0x0E) == 0).any(1)
    return bool((has_largest | (largest == 0)).all())
