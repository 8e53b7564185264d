"""The state space of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from loraserve_kernels.checks import mismatch, require_dense_last, require_like
from loraserve_kernels.recurrent import check_state, make_recurrent_batch, sequence_rows
from loraserve_kernels.step_batch import StepBatch


def check_selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    batch: StepBatch,
) -> None:
    """Raise `ValueError` unless shapes, dtypes and devices are those of `RecurrentOps.selective_scan`."""
    if x.dim() != 3 or b.dim() != 3 or b.shape[0] != x.shape[0] or c.shape != b.shape or x.shape[1] % b.shape[1]:
        raise mismatch(
            "x, b and c",
            (list(x.shape), list(b.shape), list(c.shape)),
            "[T, num_heads, head_dim] and [T, num_groups, state_dim] twice, num_heads a multiple of num_groups",
        )
    for name, tensor in (("b", b), ("c", c), ("dt", dt)):
        require_like(name, tensor, "x", x)
        require_dense_last(name, tensor)
    require_dense_last("x", x)
    if dt.shape != x.shape[:2]:
        raise mismatch("dt", list(dt.shape), f"[T, num_heads] = {list(x.shape[:2])}")
    for name, tensor in (("a", a), ("d", d), ("dt_bias", dt_bias)):
        if tensor is not None and tensor.shape != x.shape[1:2]:
            raise mismatch(name, list(tensor.shape), f"[num_heads] = [{x.shape[1]}]")
    check_state("state", state, (x.shape[1], x.shape[2], b.shape[2]), torch.float32, batch)


def selective_scan_reference(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    batch: StepBatch,
    *,
    softplus: bool,
    dt_limit: tuple[float, float],
) -> Tensor:
    """`RecurrentOps.selective_scan` in plain torch, one row after the other."""
    out = torch.empty(x.shape, device=x.device)
    per_group = x.shape[1] // b.shape[1]
    times = dt.float()
    if dt_bias is not None:
        times = times + dt_bias.float()
    if softplus:
        times = torch.nn.functional.softplus(times)
    times = times.clamp(*dt_limit)
    values = x.float()
    inputs, outputs = (tensor.float().repeat_interleave(per_group, dim=1) for tensor in (b, c))
    decays = (times * a.float()).exp()
    for rows in sequence_rows(batch, len(state)):
        s = torch.zeros_like(state[0]) if rows.read < 0 else state[rows.read].clone()
        for count, row in enumerate(range(rows.first_row, rows.end_row), start=1):
            s *= decays[row, :, None, None]
            s += (times[row, :, None] * values[row])[:, :, None] * inputs[row, :, None]
            out[row] = torch.einsum("hpn,hn->hp", s, outputs[row])
            if rows.save >= 0 and count == rows.num_rows_saved:
                state[rows.save] = s
        state[rows.write] = s
    if d is not None:
        out += d.float()[:, None] * values
    return out


@dataclass(slots=True)
class SelectiveScanInputs:
    """Arguments of one `selective_scan` call."""

    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor | None
    dt_bias: Tensor | None
    state: Tensor
    batch: StepBatch


def make_selective_scan_inputs(
    num_rows: list[int],
    num_heads: int,
    num_groups: int,
    head_dim: int,
    state_dim: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    *,
    has_d: bool = True,
) -> SelectiveScanInputs:
    """Random rows, slices of one fused output; slots that no sequence reads are NaN."""
    generator = torch.Generator().manual_seed(seed)
    batch, num_slots = make_recurrent_batch(num_rows, device, seed=seed)
    assert batch.state_slots is not None
    num_tokens = sum(num_rows)
    sizes = [num_heads * head_dim, num_groups * state_dim, num_groups * state_dim, num_heads]
    fused = torch.randn(num_tokens, sum(sizes), generator=generator).to(device, dtype)
    x, b, c, dt = fused.split(sizes, dim=1)
    state = torch.full((num_slots, num_heads, head_dim, state_dim), float("nan"), device=device)
    for slot in batch.state_slots.read.tolist():
        if slot >= 0:
            state[slot] = torch.randn(state.shape[1:], generator=generator).to(device)
    return SelectiveScanInputs(
        x.view(num_tokens, num_heads, head_dim),
        dt,
        -torch.rand(num_heads, generator=generator).mul(4).exp().to(device),
        b.view(num_tokens, num_groups, state_dim),
        c.view(num_tokens, num_groups, state_dim),
        torch.randn(num_heads, generator=generator).to(device, dtype) if has_d else None,
        torch.randn(num_heads, generator=generator).to(device, dtype),
        state,
        batch,
    )
