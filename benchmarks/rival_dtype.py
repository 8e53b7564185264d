"""The dtype in which torch itself computes a model with bfloat16 weights fastest here: what its arms, and vLLM, use."""

from typing import Literal

import torch

from loraserve.models.cpu_features import has_fast_bfloat16


def rival_dtype() -> torch.dtype | Literal["auto"]:
    """The weights' own, or float32 where there are no instructions: with AVX2 `generate` is twice as fast in it."""
    return "auto" if has_fast_bfloat16() else torch.float32


def rival_dtype_name(weights: str) -> str:
    """Its name for a command line. weights: their dtype. With AVX2 vLLM is four times slower in bfloat16."""
    return weights if has_fast_bfloat16() else "float32"
