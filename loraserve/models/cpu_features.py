"""Which operations of torch's are fast on this CPU."""

import platform

import torch


def has_fast_bfloat16() -> bool:
    """For torch's operations, which are oneDNN's; torch for macOS comes without oneDNN."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported")):
        return False
    # oneDNN reports support on x86 for any CPU with AVX-512, on Arm only for CPUs with the instructions.
    has_instructions = platform.machine() in ("aarch64", "arm64") or torch.cpu._is_avx512_bf16_supported()
    return has_instructions and torch.ops.mkldnn._is_mkldnn_bf16_supported()
