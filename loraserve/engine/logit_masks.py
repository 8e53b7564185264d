"""Rows of logits are held to the tokens that their grammars allow next."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraserve.engine.grammar import GrammarMatcher

_IS_ALLOWED = (np.arange(256)[:, None] >> np.arange(8)) % 2 == 1
"""[256, 8]: what a byte of a mask says of its tokens."""
_KEPT_BITS = {size: np.where(_IS_ALLOWED, -1, 0).astype(f"i{size}") for size in (2, 4)}
"""By the bytes of a logit."""
_MINUS_INFINITY = {torch.float32: -0x800000, torch.bfloat16: -0x80, torch.float16: -0x400}
"""As an integer of the same bits."""
_INTEGERS = {2: torch.int16, 4: torch.int32}


@torch.inference_mode()
def mask_logits(logits: Tensor, matchers: Sequence[tuple[int, GrammarMatcher]], vocab_size: int) -> None:
    """Set what may not come next to -inf, in place. Waits for no device.

    logits: [R, at least vocab_size]; only the rows that `matchers` names are written to.
    """
    rows = [logits[row, :vocab_size] for row, _ in matchers]
    masks = [matcher.mask() for _, matcher in matchers]
    if logits.device.type == "cpu":
        for row, mask in zip(rows, masks, strict=True):
            _mask_on_host(row, mask)
        return
    on_device = torch.from_numpy(np.stack(masks)).pin_memory().to(logits.device, non_blocking=True)
    is_out = (on_device[:, :, None] >> torch.arange(8, device=logits.device)) % 2 == 0
    for row, out in zip(rows, is_out.flatten(1), strict=True):
        row[: len(out)].masked_fill_(out[: len(row)], -torch.inf)
        row[len(out) :] = -torch.inf


def _mask_on_host(row: Tensor, mask: NDArray[np.uint8]) -> None:
    """In numpy, which takes a third of the time of torch's masked_fill and leaves the other threads alone."""
    bits = row.view(_INTEGERS[row.itemsize]).numpy()
    kept = np.take(_KEPT_BITS[row.itemsize], mask, axis=0).ravel()[: len(bits)]
    known = bits[: len(kept)]
    known &= kept
    np.invert(kept, out=kept)
    kept &= _MINUS_INFINITY[row.dtype]
    known |= kept
    bits[len(kept) :] = _MINUS_INFINITY[row.dtype]
