"""silu(gate) * up."""

# Python type checkers do not understand the launch options, constants and loops of kernels.
# pyright: reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraserve_kernels.launch_sizes import ceil_div
from loraserve_kernels.triton_ops.launch import launch, wait_for_inputs

_BLOCK = 1024
"""Columns per program: 14 programs for a row of 14336, so that even one row is spread over the GPU."""


@triton.jit
def _silu_mul_kernel(
    gate_ptr, up_ptr, out_ptr, size, gate_stride, up_stride, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr
):
    wait_for_inputs(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + columns, mask=mask, other=0.0).to(tl.float32)
    decay = tl.exp(-tl.abs(gate))  # in (0, 1]: never overflows
    out = tl.where(gate > 0, gate, gate * decay) / (1.0 + decay) * up
    tl.store(out_ptr + row * size + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`Backend.silu_mul`."""
    num_rows, size = gate.shape
    out = torch.empty((num_rows, size), dtype=gate.dtype, device=gate.device)
    if out.numel():
        grid = (num_rows, ceil_div(size, _BLOCK))
        strides = (gate.stride(0), up.stride(0))
        launch(_silu_mul_kernel, grid, gate, up, out, size, *strides, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=True)
    return out
