"""The dtype in which torch itself computes a model with bfloat16 weights fastest here: what its arms use."""

from typing import Literal

import torch

from loraserve.models.loader import has_fast_bfloat16


def rival_dtype() -> torch.dtype | Literal["auto"]:
    """The weights' own, or float32 where there are no instructions: with AVX2 `generate` is twice as fast in it."""
    return "auto" if has_fast_bfloat16() else torch.float32
