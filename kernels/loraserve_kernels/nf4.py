"""Weights as bitsandbytes has them in NF4, made whole. `csrc/nf4.c` does it faster."""

import torch
from torch import Tensor
from torch.nn.functional import embedding

from loraserve_kernels.checks import mismatch
from loraserve_kernels.quantization import NF4_BLOCK
from loraserve_kernels.quantized_weight import LARGEST_NF4, NF4_MULTIPLES

LEVELS = torch.tensor(
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
"""Of the largest weight. Quantiles of a normal distribution (Dettmers et al., "QLoRA"), as bitsandbytes has them."""
PACKED_LEVELS = NF4_MULTIPLES / LARGEST_NF4
"""Those of weights that are packed in `Quantization.NF4`."""
_PIECE = 1 << 14
"""Blocks made whole at a time."""


def whole_nf4(codes: Tensor, largest: Tensor, levels: Tensor, out: Tensor) -> Tensor:
    """Into `out`, dense [..., blocks * 64], which is returned: in float32, rounded once.

    codes: uint8 [..., blocks, 32], places in levels, two in a byte, the first in its upper bits; largest: float32
    [..., blocks]; levels: float32 [16], `LEVELS` or `PACKED_LEVELS`.
    """
    check_whole_nf4(codes, largest, levels, out)
    of_byte = torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1).to(codes.device)
    pieces = (
        part.split(_PIECE) for part in (out.view(-1, NF4_BLOCK), codes.view(-1, NF4_BLOCK // 2), largest.view(-1, 1))
    )
    for target, block, of_block in zip(*pieces, strict=True):
        target.copy_(embedding(block.int(), of_byte).flatten(1) * of_block)
    return out


def check_whole_nf4(codes: Tensor, largest: Tensor, levels: Tensor, out: Tensor) -> None:
    """Raises `ValueError`."""
    if codes.dtype != torch.uint8 or codes.shape[-1] != NF4_BLOCK // 2 or not codes.is_contiguous():
        raise mismatch("codes", f"{list(codes.shape)} {codes.dtype}", f"dense [..., {NF4_BLOCK // 2}] torch.uint8")
    if largest.dtype != torch.float32 or largest.shape != codes.shape[:-1] or not largest.is_contiguous():
        expected = f"dense {list(codes.shape[:-1])} torch.float32"
        raise mismatch("largest", f"{list(largest.shape)} {largest.dtype}", expected)
    if levels.dtype != torch.float32 or levels.shape != (16,) or not levels.is_contiguous():
        raise mismatch("levels", f"{list(levels.shape)} {levels.dtype}", "dense [16] torch.float32")
    if out.shape != (*codes.shape[:-2], codes.shape[-2] * NF4_BLOCK) or not out.is_contiguous():
        raise mismatch("out", list(out.shape), f"dense {[*codes.shape[:-2], codes.shape[-2] * NF4_BLOCK]}")
