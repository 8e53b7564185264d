"""RMSNorm, alone or together with the residual addition before it, which saves reading the sum again."""

# Python type checkers do not understand the launch options, constants and loops of kernels.
# pyright: reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraserve_kernels.launch_sizes import ceil_div, power_of_2
from loraserve_kernels.triton_ops.launch import launch, wait_for_inputs

_TILE = 2048
"""Elements per program if rows are shorter: heads of 128 are computed 16 at once."""


# Not recompiled for batches of one row or a multiple of 16 rows.
@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    sum_ptr,
    out_ptr,
    num_rows,
    num_heads,
    size,
    x_row_stride,
    x_head_stride,
    residual_row_stride,
    residual_head_stride,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_inputs(IS_DEPENDENT)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    mask = (rows < num_rows) & (columns < size)
    token = (rows // num_heads).to(tl.int64)
    head = (rows % num_heads).to(tl.int64)
    out_offset = rows.to(tl.int64) * size + columns
    values = tl.load(x_ptr + token * x_row_stride + head * x_head_stride + columns, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual_offset = token * residual_row_stride + head * residual_head_stride + columns
        residual = tl.load(residual_ptr + residual_offset, mask=mask, other=0.0)
        # Rounded before normalizing, as by two separate operations.
        values = (values.to(tl.float32) + residual.to(tl.float32)).to(values.dtype)
        tl.store(sum_ptr + out_offset, values, mask=mask)
    values = values.to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < size, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=1)[:, None] / size + eps)
    tl.store(out_ptr + out_offset, (values * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`Backend.rms_norm`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, None, out, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + residual in their dtype, its RMSNorm), both new and dense; the same values as from two operations."""
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = torch.empty_like(total)
    _launch(x, residual, weight, total, out, eps)
    return total, out


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, total: Tensor | None, out: Tensor, eps: float) -> None:
    if not x.numel():
        return
    heads = _as_heads(x)
    residual_heads = heads if residual is None else _as_heads(residual)
    size = x.shape[-1]
    num_rows = x.numel() // size
    columns = power_of_2(size)
    rows = max(1, _TILE // columns)
    launch(
        _rms_norm_kernel,
        (ceil_div(num_rows, rows),),
        heads,
        residual_heads,
        weight,
        out if total is None else total,
        out,
        num_rows,
        heads.shape[1],
        size,
        heads.stride(0),
        heads.stride(1),
        residual_heads.stride(0),
        residual_heads.stride(1),
        eps,
        HAS_RESIDUAL=residual is not None,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4 if columns <= 2048 else 8 if columns <= 8192 else 16,  # at most 32 float32 values per thread
        enable_fp_fusion=True,
    )


def _as_heads(x: Tensor) -> Tensor:
    """[T, H, D]; a view, unless there are three or more leading dimensions and they are strided unevenly."""
    return x.reshape(1, 1, -1) if x.dim() == 1 else x[:, None] if x.dim() == 2 else x.flatten(0, -3)
