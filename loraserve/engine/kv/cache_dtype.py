"""Which dtype the KV cache has if it is not the model's."""

import torch
from loraserve_kernels.kv_float8 import KV_FLOAT8

from loraserve.engine.device.accelerator import Accelerator
from loraserve.engine.errors import EngineStartError

FLOAT8_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with instructions that convert e4m3."""


def choose_kv_cache_dtype(requested: str, accelerator: Accelerator | None) -> torch.dtype | None:
    """None = the model's. accelerator: None on a CPU. Raises `EngineStartError`."""
    if requested == "auto":
        return None
    if requested != "fp8":
        raise EngineStartError(f"--kv-cache-dtype {requested} is not supported: choose auto or fp8")
    major, minor = FLOAT8_CAPABILITY
    needs = f"--kv-cache-dtype fp8 needs an NVIDIA GPU of compute capability {major}.{minor} or newer"
    if accelerator is None:
        raise EngineStartError(f"{needs}, but this is a CPU: choose auto")
    if accelerator.capability < FLOAT8_CAPABILITY:
        found = "{}.{}".format(*accelerator.capability)
        raise EngineStartError(f"{needs}, but {accelerator.device} has {found}: choose auto")
    return KV_FLOAT8
