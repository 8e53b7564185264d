"""The dtype in which torch computes a model with bfloat16 weights fastest on this CPU. torch's arms and vLLM use it."""

from typing import Literal

import torch

from loraserve.models.cpu_features import has_fast_bfloat16


def rival_dtype() -> torch.dtype | Literal["auto"]:
    """The weights' own, or float32 on CPUs without bfloat16 instructions: with AVX2, `generate` is twice as fast."""
    return "auto" if has_fast_bfloat16() else torch.float32


def rival_dtype_name(weights: str) -> str:
    """The dtype's name on a command line. weights: their dtype. With AVX2, vLLM is four times slower in bfloat16."""
    return weights if has_fast_bfloat16() else "float32"
