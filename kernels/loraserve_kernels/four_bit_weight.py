"""Four-bit weights of quantized checkpoints, with a scale per group; `csrc/four_bit_weight.c` packs them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loraserve_kernels.checks import mismatch
from loraserve_kernels.quantization import STORED, Quantization

MXFP4_MULTIPLES = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.float32)
"""Twice the values that the codes stand for in the format's definition, so that all are integers."""
NF4_MULTIPLES = torch.tensor(
    [-2048, -1426, -1075, -809, -583, -378, -186, 0, 163, 330, 504, 692, 903, 1152, 1481, 2048], dtype=torch.float32
)
LARGEST_NF4 = 2048
_UINT4_MULTIPLES = torch.arange(16, dtype=torch.float32)
_MULTIPLES = {
    Quantization.MXFP4: MXFP4_MULTIPLES,
    Quantization.NF4: NF4_MULTIPLES,
    Quantization.UINT4: _UINT4_MULTIPLES,
    Quantization.UINT4_G128: _UINT4_MULTIPLES,
}
_PIECE = 1 << 16
"""Weights dequantized at once; few enough to stay in a CPU cache."""


@dataclass(frozen=True, slots=True)
class FourBitWeight:
    """A weight [N, K], K a multiple of the group size.

    Raises `ValueError` for tensors that are not dense or have other shapes or dtypes, and for an order that is not a
    permutation of all inputs.
    """

    quantization: Quantization
    """One of `STORED`: the multiples that codes stand for, and how many weights share a scale."""
    codes: Tensor
    """uint8 [N, K / 2], in the order of inputs, two per byte, the first in the lower bits."""
    scales: Tensor
    """bfloat16 [N, K / group size], from `to_scales`."""
    zeros: Tensor | None = None
    """uint8 [N, K / group size], subtracted from the codes of each group; None for formats without zero points."""
    order: Tensor | None = None
    """int32 [K]: the inputs of the first group, then those of the next. None = groups are consecutive inputs."""

    def __post_init__(self) -> None:
        if self.quantization not in STORED:
            raise mismatch("quantization", self.quantization, f"one of {', '.join(STORED)}")
        num_outputs, group_size = self.codes.shape[0], self.group_size
        num_groups = 2 * self.codes.shape[-1] // group_size
        _require("codes", self.codes, torch.uint8, (num_outputs, num_groups * group_size // 2))
        _require("scales", self.scales, torch.bfloat16, (num_outputs, num_groups))
        if (self.zeros is not None) is not self.quantization.has_zero_points:
            found, expected = ("None", "uint8") if self.zeros is None else ("given", "None")
            raise mismatch("zeros", found, f"{expected} of {self.quantization}")
        if self.zeros is not None:
            _require("zeros", self.zeros, torch.uint8, (num_outputs, num_groups))
        if self.order is not None:
            depth = self.shape[1]
            _require("order", self.order, torch.int32, (depth,))
            if not torch.equal(self.order.sort().values, torch.arange(depth, dtype=torch.int32)):
                raise mismatch("order", "no permutation", f"each of 0 to {depth - 1} once")

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.codes.shape[0], 2 * self.codes.shape[1]

    @property
    def group_size(self) -> int:
        return self.quantization.group_size(2 * self.codes.shape[-1])


def joined(weights: Sequence[FourBitWeight]) -> FourBitWeight:
    """The weights, of one format and K, joined along their outputs. Raises `ValueError` if their orders differ."""
    first = weights[0]
    if len(weights) == 1:
        return first
    if not have_one_order([weight.order for weight in weights]):
        raise mismatch("order", "several", "one for all")
    zeros = [weight.zeros for weight in weights if weight.zeros is not None]
    return FourBitWeight(
        first.quantization,
        torch.cat([weight.codes for weight in weights]),
        torch.cat([weight.scales for weight in weights]),
        torch.cat(zeros) if zeros else None,
        first.order,
    )


def have_one_order(orders: Sequence[Tensor | None]) -> bool:
    """Whether all are equal. orders: of `FourBitWeight`s."""
    given = [order for order in orders if order is not None]
    return not given or (len(given) == len(orders) and all(torch.equal(order, given[0]) for order in given[1:]))


def to_scales(scales: Tensor) -> Tensor:
    """Scales rounded to bfloat16; those below its normal range become zero."""
    rounded = scales.bfloat16()
    return torch.where(rounded.abs() < torch.finfo(torch.bfloat16).tiny, 0, rounded)


def dequantize_weight(weight: FourBitWeight, out: Tensor) -> Tensor:
    """Dequantize into `out`, dense [N, K], and return it: multiples times scales in float32, rounded once."""
    check_dequantize_weight(weight, out)
    multiples = _MULTIPLES[weight.quantization].to(out.device)
    num_rows = max(1, _PIECE // max(1, weight.shape[1]))
    zeros = torch.zeros_like(weight.scales, dtype=torch.uint8) if weight.zeros is None else weight.zeros
    places = torch.arange(weight.shape[1]) if weight.order is None else weight.order.argsort()
    group_of = (places // weight.group_size).to(out.device)
    pieces = (part.split(num_rows) for part in (out, weight.codes, weight.scales, zeros))
    for target, codes, scales, zero_points in zip(*pieces, strict=True):
        found = multiples[torch.stack([codes & 15, codes >> 4], -1).flatten(1).int()] - zero_points[:, group_of]
        target.copy_(found.mul_(scales.float()[:, group_of]))
    return out


def check_dequantize_weight(weight: FourBitWeight, out: Tensor) -> None:
    """Raise `ValueError` unless `out` is dense and of the weight's shape."""
    if tuple(out.shape) != weight.shape or not out.is_contiguous():
        raise mismatch("out", list(out.shape), f"dense {list(weight.shape)}")


class FourBitLinear:
    """x Wᵀ + bias in plain torch: each call dequantizes the whole weight."""

    def __init__(self, weight: FourBitWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        """bias: [N]; dtype: of the bias and of rows."""
        self.out_features, self.in_features = weight.shape
        self.dtype = dtype
        self.bias = None if bias is None else bias.detach()
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., K] -> [..., N]."""
        if x.shape[-1] != self.in_features or x.dtype != self.dtype:
            raise mismatch("x", f"{list(x.shape)} {x.dtype}", f"[..., {self.in_features}] {self.dtype}")
        dequantized = dequantize_weight(self._weight, x.new_empty(self._weight.shape))
        return torch.nn.functional.linear(x, dequantized, self.bias)

    def rows(self, indices: Tensor) -> Tensor:
        """See `Linear.rows`."""
        weight, flat = self._weight, indices.flatten()
        zeros = None if weight.zeros is None else weight.zeros[flat]
        of_rows = replace(weight, codes=weight.codes[flat], scales=weight.scales[flat], zeros=zeros)
        dequantized = dequantize_weight(of_rows, torch.empty(of_rows.shape, dtype=self.dtype, device=flat.device))
        return dequantized.view(*indices.shape, self.in_features)


def _require(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise mismatch(name, f"{list(tensor.shape)} {tensor.dtype}", f"dense {list(shape)} {dtype}")
