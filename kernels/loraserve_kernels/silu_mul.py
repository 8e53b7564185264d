"""silu(gate) * up, the activation of a gated MLP (Shazeer 2020, SwiGLU)."""

import torch
from torch import Tensor

from loraserve_kernels.checks import mismatch, require_dense_last, require_like, require_rows


def check_silu_mul(gate: Tensor, up: Tensor) -> None:
    """Raise `ValueError` unless shapes, dtypes and devices are those of `Backend.silu_mul`."""
    if gate.dim() != 2:
        raise mismatch("gate", list(gate.shape), "[T, N]")
    require_rows("up", up, gate.shape[1])
    if up.shape[0] != gate.shape[0]:
        raise mismatch("up", f"{up.shape[0]} rows", f"{gate.shape[0]}, as gate")
    require_like("up", up, "gate", gate)
    require_dense_last("gate", gate)


def silu_mul_reference(gate: Tensor, up: Tensor) -> Tensor:
    """`Backend.silu_mul` in plain torch, in float32."""
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)


def make_silu_mul_inputs(
    num_rows: int, size: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor]:
    """(gate, up): halves of one fused output, some gates far outside the range of exp."""
    generator = torch.Generator().manual_seed(seed)
    fused = torch.randn(num_rows, 2 * size, generator=generator) * 4
    fused[::3, ::7] *= 60
    gate, up = fused.to(device, dtype).split(size, dim=1)
    return gate, up
