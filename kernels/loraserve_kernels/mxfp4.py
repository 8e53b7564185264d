"""Weights as checkpoints have them in MXFP4 (OCP's Microscaling Formats): made whole. `csrc/mxfp4.c` does it faster."""

import torch
from torch import Tensor

from loraserve_kernels.checks import mismatch
from loraserve_kernels.quantization import GROUP

_ELEMENTS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_EXPONENT_BIAS = 127
_PIECE = 1 << 16
"""Blocks made whole at a time."""


def whole_mxfp4(blocks: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """Into `out`, dense [..., groups * 32], which is returned.

    blocks: uint8 [..., groups, 16], elements two in a byte, the first in its lower bits; scales: uint8 [..., groups],
    exponents of two over -127. What is too large for the dtype is infinite, what is below its normal range maybe 0.
    """
    check_whole_mxfp4(blocks, scales, out)
    elements = _ELEMENTS.to(blocks.device)
    pieces = (part.split(_PIECE) for part in (out.view(-1, GROUP), blocks.view(-1, GROUP // 2), scales.view(-1, 1)))
    for target, block, scale in zip(*pieces, strict=True):
        places = torch.stack([block & 15, block >> 4], -1).flatten(1)
        target.copy_(torch.ldexp(elements[places.int()], scale.int() - _EXPONENT_BIAS))
    return out


def check_whole_mxfp4(blocks: Tensor, scales: Tensor, out: Tensor) -> None:
    """Raises `ValueError`."""
    if blocks.dtype != torch.uint8 or blocks.shape[-1] != GROUP // 2 or not blocks.is_contiguous():
        raise mismatch("blocks", f"{list(blocks.shape)} {blocks.dtype}", f"dense [..., {GROUP // 2}] torch.uint8")
    if scales.dtype != torch.uint8 or scales.shape != blocks.shape[:-1] or not scales.is_contiguous():
        expected = f"dense {list(blocks.shape[:-1])} torch.uint8"
        raise mismatch("scales", f"{list(scales.shape)} {scales.dtype}", expected)
    if out.shape != (*blocks.shape[:-2], blocks.shape[-2] * GROUP) or not out.is_contiguous():
        raise mismatch("out", list(out.shape), f"dense {[*blocks.shape[:-2], blocks.shape[-2] * GROUP]}")
