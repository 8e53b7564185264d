"""Weights rounded to eight bits, a scale for each output; `csrc/int8_weight.h` has them for our own C kernel."""

import torch
from torch import Tensor

from loraserve_kernels.checks import mismatch, require_like
from loraserve_kernels.prepacked_linear import check_linear

MAX_MULTIPLE = 127
_PIECE = 1 << 16
"""Weights rounded at a time: they stay in a cache meanwhile."""


class Int8Linear:
    """x Wᵀ + bias of a weight rounded to eight bits, the plain way: the weight is made whole again for each call.

    weight: [N, K], bias: [N] or None; the caller may free the weight.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        check_linear(weight, bias)
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]
        self.dtype = weight.dtype
        self.bias = None if bias is None else bias.detach()
        multiples, self._scale = _multiples_of(weight.detach())
        self._multiples = multiples.to(torch.int8)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., K] -> [..., N]."""
        if x.shape[-1] != self.in_features or x.dtype != self.dtype:
            raise mismatch("x", f"{list(x.shape)} {x.dtype}", f"[..., {self.in_features}] {self.dtype}")
        return torch.nn.functional.linear(x, (self._multiples * self._scale).to(self.dtype), self.bias)


def rounded_to_int8(weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Each output's weights as multiples of a 127th of the largest: [..., N, K], in the weight's dtype.

    The multiples are rounded to the dtype again. Rounding twice changes nothing. out: dense, of the weight's shape and
    dtype, what is returned; None = a tensor of its own.
    """
    rounded = rounded_like(weight, out)
    num_rows = max(1, _PIECE // weight.shape[-1])
    targets, pieces = (whole.flatten(0, -2).split(num_rows) for whole in (rounded, weight.detach()))
    for target, piece in zip(targets, pieces, strict=True):
        multiples, scale = _multiples_of(piece)
        target.copy_(multiples.mul_(scale))
    return rounded


def rounded_like(weight: Tensor, out: Tensor | None) -> Tensor:
    """Where `rounded_to_int8` writes. Raises `ValueError` for an `out` that is not like the weight, or not dense."""
    if out is None:
        return torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    require_like("out", out, "weight", weight)
    if out.shape != weight.shape or not out.is_contiguous():
        raise mismatch("out", f"{list(out.shape)}", f"dense {list(weight.shape)}, as weight")
    return out


def _multiples_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    """float32 both, of the weight's shape and [..., N, 1]."""
    scale = weight.abs().amax(-1, keepdim=True).float() / MAX_MULTIPLE
    # Of a scale below the normal range quotients may be larger than any multiple there is.
    quotients = weight.float().div(torch.where(scale > 0, scale, 1.0)).clamp_(-MAX_MULTIPLE, MAX_MULTIPLE)
    return quotients.round_(), scale
