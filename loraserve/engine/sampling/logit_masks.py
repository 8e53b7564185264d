"""Restricts rows of logits to the tokens that their grammars allow next."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraserve.engine.device.accelerator import upload

_IS_ALLOWED = (np.arange(256)[:, None] >> np.arange(8)) % 2 == 1
"""[256, 8]: which of its eight tokens a byte of a mask allows."""
_KEPT_BITS = {size: np.where(_IS_ALLOWED, -1, 0).astype(f"i{size}") for size in (2, 4)}
"""By the bytes of a logit: all bits for an allowed token, else none."""
_MINUS_INFINITY = {torch.float32: -0x800000, torch.bfloat16: -0x80, torch.float16: -0x400}
"""As an integer with the same bits."""
_INTEGERS = {2: torch.int16, 4: torch.int32}


@torch.inference_mode()
def mask_logits(logits: Tensor, masks: Sequence[tuple[int, NDArray[np.uint8]]], vocab_size: int) -> None:
    """Set the logits of tokens that may not come next to -inf, in place. Waits for no device.

    logits: [R, at least vocab_size]; only the rows that `masks` names are written to. Masks are as in `OutputMatcher`.
    """
    rows, of_rows = [logits[row, :vocab_size] for row, _ in masks], [mask for _, mask in masks]
    if logits.device.type == "cpu":
        _mask_on_host(rows, of_rows)
    else:
        _mask_on_device(rows, of_rows)


def _mask_on_host(rows: Sequence[Tensor], masks: Sequence[NDArray[np.uint8]]) -> None:
    """In numpy, which leaves the other threads alone. For 16,000 tokens it takes half the time of torch's masked_fill,
    for 152,000 a quarter (12 and 73 µs in float32, Zen 4)."""
    for row, mask in zip(rows, masks, strict=True):
        bits = row.view(_INTEGERS[row.itemsize]).numpy()
        kept = np.take(_KEPT_BITS[row.itemsize], mask, axis=0).ravel()[: len(bits)]
        known = bits[: len(kept)]
        known &= kept
        np.invert(kept, out=kept)
        kept &= _MINUS_INFINITY[row.dtype]
        known |= kept
        bits[len(kept) :] = _MINUS_INFINITY[row.dtype]


def _mask_on_device(rows: Sequence[Tensor], masks: Sequence[NDArray[np.uint8]]) -> None:
    """Takes one byte per token; int64 would take 600 MB for 256 rows with a vocabulary of 152k (calculated)."""
    stacked = np.zeros((len(masks), max(map(len, masks))), np.uint8)
    for row, mask in zip(stacked, masks, strict=True):
        row[: len(mask)] = mask
    on_device = upload(torch.from_numpy(stacked), rows[0].device)
    is_out = (on_device[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=rows[0].device)) & 1 == 0
    for row, out in zip(rows, is_out.flatten(1), strict=True):
        row[: len(out)].masked_fill_(out[: len(row)], -torch.inf)
        row[len(out) :] = -torch.inf
