"""Quantized weights in the packed forms of checkpoints, and their dequantization.

Each form follows the library that writes it: bitsandbytes, AutoGPTQ and GPTQModel, AutoAWQ, compressed-tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from loraserve_kernels.quantization import GROUP
from torch import Tensor
from torch.nn.functional import embedding

AWQ_BITS = 4
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""For each four-bit field of a word, from the lowest on, its column among eight."""
_AWQ_PLACES = torch.tensor(AWQ_ORDER).argsort()
"""For each of eight columns, its four-bit field in a word."""
NF4_LEVELS = torch.tensor(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ]
)
"""Quantiles of a normal distribution (Dettmers et al., "QLoRA"), as bitsandbytes has them."""
_LARGEST_INT8 = 127
_FLOATS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""Values of four-bit floats with two exponent bits and one fraction bit."""
_EXPONENT_BIAS = 127


class PackedWeight(Protocol):
    """A weight in its checkpoint's packed form."""

    @property
    def shape(self) -> tuple[int, int]:
        """[out_features, in_features]."""
        ...

    @property
    def packed(self) -> Tensor:
        """The packed values; may be mapped from the file."""
        ...

    def dequantize(self) -> Tensor:
        """The dequantized weight, in float32 or in the dtype that the form rounds to."""
        ...


@dataclass(frozen=True, slots=True)
class BlocksOfLevels:
    """bitsandbytes' four-bit form: levels times each block's largest value, a float or itself in eight bits."""

    shape: tuple[int, int]
    dtype: torch.dtype
    """The dtype that products are rounded to."""
    block_size: int
    """In elements, counted row after row."""
    packed: Tensor
    """uint8 [elements / 2]: indices into `levels`, the first in the upper bits."""
    levels: Tensor
    """float32 [16]."""
    of_blocks: Tensor
    """[blocks]: each block's largest value as a float, or its uint8 index into the first of `nested`."""
    nested: tuple[Tensor, Tensor, int, float] | None
    """(values of the indices [256], largest value of each group of blocks [groups], blocks per group, offset): a
    block's largest value is value * largest + offset. None = `of_blocks` has floats."""

    def largest(self) -> Tensor:
        """Each block's largest value: float32 [blocks]."""
        if self.nested is None:
            return self.of_blocks.float()
        multiples, largest, size, offset = self.nested
        return (
            multiples[self.of_blocks.long()] * largest.repeat_interleave(size)[: len(self.of_blocks)] + offset
        ).float()

    def dequantize(self) -> Tensor:
        of_byte = torch.stack([self.levels.repeat_interleave(16), self.levels.repeat(16)], dim=1)
        whole, largest = embedding(self.packed.int(), of_byte).flatten(), self.largest()
        num_elements = self.shape[0] * self.shape[1]
        if num_elements % self.block_size == 0:
            whole.view(-1, self.block_size).mul_(largest[:, None])
        else:
            whole = whole[:num_elements] * largest.repeat_interleave(self.block_size)[:num_elements]
        return whole.to(self.dtype).view(self.shape)


class Layout(NamedTuple):
    """How 32-bit words hold several codes each."""

    in_bytes: Callable[[Tensor, int], Tensor]
    """(words, bits per code) -> uint8 [out_features, in_features], with padding columns if words have any."""
    in_pairs: Callable[[Tensor], Tensor]
    """Words of four-bit codes -> uint8 [out_features, in_features / 2], a byte's first code in its lower bits."""


@dataclass(frozen=True, slots=True)
class GroupsOfCodes:
    """(code - zero point) * scale, both per group of inputs: the form of GPTQ, AWQ and compressed-tensors."""

    shape: tuple[int, int]
    bits: int
    packed: Tensor
    """int32."""
    layout: Layout
    """The layout of `packed`."""
    zeros: Tensor
    """uint8 [groups, out_features]."""
    scales: Tensor
    """[groups, out_features]."""
    group_size: int
    group_of_row: Tensor | None
    """int64 [in_features]: each input's group; None = a group's inputs are adjacent."""

    @property
    def has_full_groups(self) -> bool:
        """Whether all groups, except possibly the last, have `group_size` inputs, adjacent or not."""
        expected = torch.arange(self.shape[1]) // self.group_size
        return self.group_of_row is None or torch.equal(self.group_of_row.sort().values, expected)

    @property
    def order(self) -> Tensor | None:
        """int32 [in_features]: the inputs of the first group, then those of the next. None = already in this order."""
        if self.group_of_row is None or bool((self.group_of_row.diff() >= 0).all()):
            return None
        return self.group_of_row.argsort(stable=True).int()

    def dequantize(self) -> Tensor:
        codes = self.layout.in_bytes(self.packed, self.bits)[:, : self.shape[1]]
        zeros, scales = self.zeros.T.float(), self.scales.T.float()
        if self.group_of_row is None and self.shape[1] % self.group_size == 0:
            # 4,096 × 4,096 codes take 30 ms; with a scale and zero point gathered for each code, 114 (two Zen 4 cores).
            grouped = codes.unflatten(1, (-1, self.group_size)).float()
            return grouped.sub_(zeros[..., None]).mul_(scales[..., None]).flatten(1)
        group_of_row = self.group_of_row
        if group_of_row is None:
            group_of_row = torch.arange(self.shape[1]) // self.group_size
        return codes.float().sub_(zeros[:, group_of_row]).mul_(scales[:, group_of_row])


@dataclass(frozen=True, slots=True)
class GroupsOfFloats:
    """compressed-tensors' MXFP4 form: four-bit floats, times a power of two for each `GROUP` inputs."""

    packed: Tensor
    """uint8 [out_features, in_features / 2], two per byte, the first in its lower bits."""
    exponents: Tensor
    """uint8 [out_features, in_features / GROUP]: exponents of two, plus 127."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], 2 * self.packed.shape[1]

    def dequantize(self) -> Tensor:
        of_byte = torch.stack([_FLOATS.repeat(16), _FLOATS.repeat_interleave(16)], dim=1)
        grouped = embedding(self.packed.int(), of_byte).flatten(1).unflatten(1, (-1, GROUP))
        return torch.ldexp(grouped, self.exponents[..., None].int() - _EXPONENT_BIAS).flatten(1)


@dataclass(frozen=True, slots=True)
class RowsOfInt8:
    """bitsandbytes' eight-bit form."""

    packed: Tensor
    """int8 [out_features, in_features]."""
    largest: Tensor
    """[out_features]: each row's largest |weight|."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], self.packed.shape[1]

    def dequantize(self) -> Tensor:
        return self.packed.float() * (self.largest.float() / _LARGEST_INT8)[:, None]


def fields(words: Tensor, bits: int) -> Tensor:
    """int32 [m, n] -> uint8 [m, n, 32 / bits], lowest bits first. Rows may be strided."""
    # NOTE: relies on little-endian words, as on all machines that torch and safetensors run on.
    dense = words.contiguous() if words.shape[-1] > 1 else words.clone(memory_format=torch.contiguous_format)
    in_bytes = dense.view(torch.uint8).unflatten(-1, (-1, 4))
    fields = [(in_bytes >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return torch.stack(fields, dim=-1).flatten(-2)


def in_awq_order(words: Tensor) -> Tensor:
    """int32 [m, n] -> uint8 [m, 8 n], with AWQ's order of columns undone."""
    return fields(words, AWQ_BITS)[..., _AWQ_PLACES].flatten(1)


def _awq_pairs(words: Tensor) -> Tensor:
    first, second = words.contiguous().view(torch.uint8).unflatten(0, (-1, 2)).unbind(1)
    lower, upper = first & 15 | second << 4, first >> 4 | second & 0xF0
    pairs = torch.stack([lower, upper], -1).unflatten(1, (-1, 4)).flatten(2)[..., _AWQ_PLACES]
    return pairs.flatten(1).T.contiguous()


COLUMNS = Layout(
    lambda words, bits: fields(words, bits).movedim(1, 0).flatten(1),
    lambda words: words.T.contiguous().view(torch.uint8),
)
"""[in_features / n, out_features]: a word has n codes of one column, the first in its lowest bits."""
ROWS = Layout(lambda words, bits: fields(words, bits).flatten(1), lambda words: words.contiguous().view(torch.uint8))
"""[out_features, in_features / n]: likewise n codes of one row."""
AWQ_COLUMNS = Layout(lambda words, _: in_awq_order(words).T.contiguous(), _awq_pairs)
"""[in_features, out_features / 8]: a word has one code of each of eight columns."""
