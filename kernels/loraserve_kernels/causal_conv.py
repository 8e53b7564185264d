"""A short causal convolution along each sequence, as in Mamba and gated delta nets."""

from dataclasses import dataclass

import torch
from torch import Tensor

from loraserve_kernels.checks import mismatch, require_dense, require_like
from loraserve_kernels.recurrent import check_state, make_recurrent_batch, sequence_rows
from loraserve_kernels.step_batch import StepBatch


def check_causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, batch: StepBatch) -> None:
    """Raise `ValueError` unless shapes, dtypes and devices are those of `RecurrentOps.causal_conv`."""
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[0] != x.shape[1] or weight.shape[1] < 2:
        raise mismatch("x and weight", (list(x.shape), list(weight.shape)), "[T, C] and [C, K], K at least 2")
    require_like("weight", weight, "x", x)
    require_dense("weight", weight, x.dtype)
    if bias is not None:
        if bias.shape != weight.shape[:1]:
            raise mismatch("bias", list(bias.shape), f"[{weight.shape[0]}]")
        require_dense("bias", bias, x.dtype)
    check_state("state", state, (weight.shape[1] - 1, weight.shape[0]), x.dtype, batch)


def causal_conv_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, batch: StepBatch, *, silu: bool
) -> Tensor:
    """`RecurrentOps.causal_conv` in plain torch."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    taps = weight.float().t()
    num_before = len(taps) - 1
    for rows in sequence_rows(batch, len(state)):
        before = x.new_zeros(num_before, x.shape[1]) if rows.read < 0 else state[rows.read]
        inputs = torch.cat([before, x[rows.first_row : rows.end_row]])
        if rows.save >= 0:
            state[rows.save] = inputs[rows.num_rows_saved : rows.num_rows_saved + num_before]
        state[rows.write] = inputs[len(inputs) - num_before :]
        if rows.first_row == rows.end_row:
            continue
        result = torch.einsum("tck,kc->tc", inputs.float().unfold(0, len(taps), 1), taps)
        if bias is not None:
            result += bias.float()
        out[rows.first_row : rows.end_row] = torch.nn.functional.silu(result) if silu else result
    return out


@dataclass(slots=True)
class CausalConvInputs:
    """Arguments of one `causal_conv` call."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    state: Tensor
    batch: StepBatch


def make_causal_conv_inputs(
    num_rows: list[int],
    num_channels: int,
    kernel_size: int = 4,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    *,
    has_bias: bool = False,
) -> CausalConvInputs:
    """Random rows, a slice of a wider output; slots that no sequence reads are NaN."""
    generator = torch.Generator().manual_seed(seed)
    batch, num_slots = make_recurrent_batch(num_rows, device, seed=seed)
    assert batch.state_slots is not None
    wide = torch.randn(sum(num_rows), num_channels + 8, generator=generator).to(device, dtype)
    weight = torch.randn(num_channels, kernel_size, generator=generator).to(device, dtype)
    state = torch.full((num_slots, kernel_size - 1, num_channels), float("nan"), device=device, dtype=dtype)
    for slot in batch.state_slots.read.tolist():
        if slot >= 0:
            state[slot] = torch.randn(kernel_size - 1, num_channels, generator=generator).to(device, dtype)
    bias = torch.randn(num_channels, generator=generator).to(device, dtype) if has_bias else None
    return CausalConvInputs(wide[:, 3 : 3 + num_channels], weight, bias, state, batch)
