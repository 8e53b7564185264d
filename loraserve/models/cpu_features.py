"""What torch can do fast on this CPU."""

import platform

import torch


def has_fast_bfloat16() -> bool:
    """In torch's operations, which are oneDNN's: torch for macOS comes without."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported")):
        return False
    # On x86 it says so of every AVX-512, on Arm of CPUs with the instructions only.
    has_instructions = platform.machine() in ("aarch64", "arm64") or torch.cpu._is_avx512_bf16_supported()
    return has_instructions and torch.ops.mkldnn._is_mkldnn_bf16_supported()
