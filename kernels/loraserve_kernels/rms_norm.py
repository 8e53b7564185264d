"""x / sqrt(mean(x²) + eps) * weight (Zhang and Sennrich 2019, eq. 4). Gemma's variant: the caller passes 1 + weight."""

import torch
from torch import Tensor

from loraserve_kernels.checks import mismatch, require_dense_last, require_like


def check_rms_norm(x: Tensor, weight: Tensor) -> None:
    """Raise `ValueError` unless shapes, dtypes and devices are those of `Backend.rms_norm`."""
    if weight.shape != x.shape[-1:]:
        raise mismatch("weight", list(weight.shape), f"[{x.shape[-1]}], as x's last dimension")
    require_like("weight", weight, "x", x)
    require_dense_last("weight", weight)
    require_dense_last("x", x)


def check_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    """Raise `ValueError` unless x and weight pass `check_rms_norm` and residual is like x."""
    check_rms_norm(x, weight)
    if residual.shape != x.shape:
        raise mismatch("residual", list(residual.shape), f"{list(x.shape)}, as x")
    require_like("residual", residual, "x", x)
    require_dense_last("residual", residual)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`Backend.rms_norm` in plain torch."""
    values = x.float()
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (values * scale * weight.float()).to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + residual in their dtype, its RMSNorm)."""
    total = x + residual
    return total, rms_norm_reference(total, weight, eps)


def make_rms_norm_inputs(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor]:
    """(x, weight); x is a slice of a wider tensor."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(*shape[:-1], shape[-1] + 7, generator=generator).to(device, dtype)
    return wide[..., 3 : 3 + shape[-1]], (1 + 0.2 * torch.randn(shape[-1], generator=generator)).to(device, dtype)
