"""Weights quantized to int8 or int4; for their form in our own C kernel see `csrc/quantized_weight.h`."""

import torch
from torch import Tensor

from loraserve_kernels.checks import mismatch, require_like
from loraserve_kernels.prepacked_linear import check_linear
from loraserve_kernels.quantization import GROUP, Quantization

MAX_INT8 = 127
_NUM_INT4_SCALES = 4
"""Scales tried per group, in steps of the fifth binary digit: two below the one that makes the largest weight its
multiple -8, that one, and one above."""
_SMALLEST_SCALE = 16
"""The bits of the smallest normal float32, without the lowest 19."""
_PIECE = 1 << 16
"""Weights rounded at once; few enough to stay in a CPU cache."""


class QuantizedLinear:
    """x Wᵀ + bias with a rounded weight, in plain torch: each call dequantizes the whole weight.

    weight: [N, K], bias: [N] or None; the caller may free the weight.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, quantization: Quantization) -> None:
        check_linear(weight, bias)
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]
        self.dtype = weight.dtype
        self.bias = None if bias is None else bias.detach()
        self._quantization = quantization
        multiples, scales = [], []
        for piece in weight.detach().split(max(1, _PIECE // self.in_features)):
            of_piece, scales_of_piece = multiples_of(piece, quantization)
            multiples.append(_stored(of_piece, quantization))
            scales.append(scales_of_piece if quantization is Quantization.INT8 else scales_of_piece.bfloat16())
        self._multiples, self._scales = torch.cat(multiples), torch.cat(scales)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., K] -> [..., N]."""
        if x.shape[-1] != self.in_features or x.dtype != self.dtype:
            raise mismatch("x", f"{list(x.shape)} {x.dtype}", f"[..., {self.in_features}] {self.dtype}")
        return torch.nn.functional.linear(x, self._dequantize(self._multiples, self._scales), self.bias)

    def rows(self, indices: Tensor) -> Tensor:
        """See `Linear.rows`."""
        return self._dequantize(self._multiples[indices], self._scales[indices])

    def _dequantize(self, stored: Tensor, scales: Tensor) -> Tensor:
        multiples = _read(stored, self._quantization)
        return (multiples.float() * scales).flatten(-2)[..., : self.in_features].to(self.dtype)


def rounded_weight(weight: Tensor, quantization: Quantization, out: Tensor | None = None) -> Tensor:
    """The quantized weight, [..., N, K], in the original's dtype, to which multiples of scales are rounded again.

    All weights that share a scale with a weight that is not finite become non-finite. out: dense, of the weight's shape
    and dtype, written and returned; None = a new tensor.
    """
    rounded, depth = rounded_like(weight, out), weight.shape[-1]
    num_rows = max(1, _PIECE // depth)
    targets, pieces = (whole.flatten(0, -2).split(num_rows) for whole in (rounded, weight.detach()))
    for target, piece in zip(targets, pieces, strict=True):
        multiples, scales = multiples_of(piece, quantization)
        target.copy_(multiples.mul_(scales).flatten(-2)[:, :depth])
    return rounded


def rounded_like(weight: Tensor, out: Tensor | None) -> Tensor:
    """The tensor that `rounded_weight` writes to. Raises `ValueError` if `out` is unlike the weight, or not dense."""
    if out is None:
        return torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    require_like("out", out, "weight", weight)
    if out.shape != weight.shape or not out.is_contiguous():
        raise mismatch("out", f"{list(out.shape)}", f"dense {list(weight.shape)}, as weight")
    return out


def multiples_of(weight: Tensor, quantization: Quantization) -> tuple[Tensor, Tensor]:
    """[N, K] -> (multiples, float32 [N, groups, group size], padded with zeros; their scales [N, groups, 1]).

    quantization: of `ROUNDINGS`.
    """
    return _in_int8(weight) if quantization is Quantization.INT8 else _in_int4(weight)


def _stored(multiples: Tensor, quantization: Quantization) -> Tensor:
    """float32 -> int8 [..., group size]; int4: two per byte, [..., group size / 2]."""
    multiples = multiples.to(torch.int8)
    if quantization is Quantization.INT8:
        return multiples
    first, second = multiples.unflatten(-1, (-1, 2)).unbind(-1)
    return first << 4 | (second & 15)


def _read(stored: Tensor, quantization: Quantization) -> Tensor:
    if quantization is Quantization.INT8:
        return stored
    return torch.stack([stored >> 4, stored << 4 >> 4], -1).flatten(-2)


def _in_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    values = weight.float()[:, None]
    scales = values.abs().amax(-1, keepdim=True) / MAX_INT8
    # With a scale below the normal range, quotients may exceed the largest multiple.
    quotients = values.div(torch.where(scales > 0, scales, 1.0)).clamp_(-MAX_INT8, MAX_INT8)
    return quotients.round_(), scales


def _in_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    values = _in_groups(weight)
    most, least = values.amax(-1, keepdim=True), values.amin(-1, keepdim=True)
    largest = torch.where(most > -least, most, least) / -8
    # Squared errors are compared on values scaled to near one, whatever the weights' magnitude.
    exponents = (largest.abs().view(torch.int32) >> 23).clamp_(1, 253)
    factors = ((254 - exponents) << 23).view(torch.float32)
    values *= factors
    digits = (((largest * factors).abs_().view(torch.int32) + (1 << 18)) >> 19).sub_(2).clamp_min_(_SMALLEST_SCALE)
    errors = torch.full_like(largest, torch.inf)
    multiples, scales = torch.zeros_like(values), torch.zeros_like(largest)
    for step in range(_NUM_INT4_SCALES):
        tried = torch.copysign(((digits + step) << 19).view(torch.float32), largest)
        rounded = (values * (1 / tried)).clamp_(-8, 7).round_()
        found = _sum_of_group((values - rounded * tried).square_())
        is_better = found < errors
        errors = torch.where(is_better, found, errors)
        multiples, scales = torch.where(is_better, rounded, multiples), torch.where(is_better, tried, scales)
    is_finite = errors.isfinite()
    scales *= (exponents << 23).view(torch.float32)
    scales[scales.abs() < torch.finfo(torch.float32).tiny] = 0  # bfloat16 cannot hold all of their digits
    return torch.where(is_finite, multiples, 1.0), torch.where(is_finite, scales, torch.nan)


def _in_groups(weight: Tensor) -> Tensor:
    """[N, K] -> float32 [N, groups, GROUP], padded with zeros; never the weight's own memory."""
    return torch.nn.functional.pad(weight.float(), (0, -weight.shape[1] % GROUP)).unflatten(-1, (-1, GROUP))


def _sum_of_group(squares: Tensor) -> Tensor:
    """[..., 32] -> [..., 1], added in the same order as in our C kernel."""
    sums = squares[..., :16] + squares[..., 16:]
    while sums.shape[-1] > 1:
        sums = sums[..., ::2] + sums[..., 1::2]
    return sums
