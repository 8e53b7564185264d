"""Linear attention with the gated delta rule (Yang et al. 2024, arXiv 2412.06464)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from loraserve_kernels.checks import mismatch, require_dense_last, require_like
from loraserve_kernels.recurrent import check_state, make_recurrent_batch, sequence_rows
from loraserve_kernels.step_batch import StepBatch

EPS = 1e-6
"""Added to the sum of squares of a query or key that is normalized."""


def check_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, batch: StepBatch
) -> None:
    """Raise `ValueError` unless shapes, dtypes and devices are those of `RecurrentOps.gated_delta_rule`."""
    if q.dim() != 3 or k.shape != q.shape or v.dim() != 3 or v.shape[0] != k.shape[0] or v.shape[1] % k.shape[1]:
        raise mismatch(
            "q, k and v",
            (list(q.shape), list(k.shape), list(v.shape)),
            "[T, num_k_heads, k_dim] twice and [T, num_v_heads, v_dim], num_v_heads a multiple of num_k_heads",
        )
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        require_like(name, tensor, "v", v)
        require_dense_last(name, tensor)
    for name, tensor in (("log_decay", log_decay), ("beta", beta)):
        if tensor.shape != v.shape[:2]:
            raise mismatch(name, list(tensor.shape), f"[T, num_v_heads] = {list(v.shape[:2])}")
        require_dense_last(name, tensor)
    if log_decay.dtype != torch.float32:
        raise mismatch("log_decay.dtype", log_decay.dtype, torch.float32)
    require_like("beta", beta, "v", v)
    check_state("state", state, (v.shape[1], k.shape[2], v.shape[2]), torch.float32, batch)


def gated_delta_rule_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
    batch: StepBatch,
    *,
    normalize: bool,
) -> Tensor:
    """`RecurrentOps.gated_delta_rule` in plain torch, one row after the other."""
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    per_key_head = v.shape[1] // k.shape[1]
    decays, betas = log_decay.exp(), beta.float()
    queries, keys = _per_value_head(q, per_key_head, normalize), _per_value_head(k, per_key_head, normalize)
    queries = queries * k.shape[2] ** -0.5
    values = v.float()
    for rows in sequence_rows(batch, len(state)):
        s = torch.zeros_like(state[0]) if rows.read < 0 else state[rows.read].clone()
        for count, row in enumerate(range(rows.first_row, rows.end_row), start=1):
            s *= decays[row, :, None, None]
            missing = betas[row, :, None] * (values[row] - torch.einsum("hk,hkv->hv", keys[row], s))
            s += keys[row, :, :, None] * missing[:, None]
            out[row] = torch.einsum("hk,hkv->hv", queries[row], s)
            if rows.save >= 0 and count == rows.num_rows_saved:
                state[rows.save] = s
        state[rows.write] = s
    return out


def _per_value_head(heads: Tensor, per_key_head: int, normalize: bool) -> Tensor:
    heads = heads.float()
    if normalize:
        heads = heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + EPS)
    return heads.repeat_interleave(per_key_head, dim=1)


@dataclass(slots=True)
class GatedDeltaRuleInputs:
    """Arguments of one `gated_delta_rule` call."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor
    state: Tensor
    batch: StepBatch


def make_gated_delta_rule_inputs(
    num_rows: list[int],
    num_k_heads: int,
    num_v_heads: int,
    k_dim: int,
    v_dim: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> GatedDeltaRuleInputs:
    """Random rows, slices of one fused output, some decays close to 1 and some far below; slots that no sequence reads
    are NaN."""
    generator = torch.Generator().manual_seed(seed)
    batch, num_slots = make_recurrent_batch(num_rows, device, seed=seed)
    assert batch.state_slots is not None
    num_tokens, key_size = sum(num_rows), num_k_heads * k_dim
    fused = torch.randn(num_tokens, 2 * key_size + num_v_heads * v_dim, generator=generator).to(device, dtype)
    q, k, v = fused.split([key_size, key_size, num_v_heads * v_dim], dim=1)
    log_decay = -torch.rand(num_tokens, num_v_heads, generator=generator).pow(4) * 5
    beta = torch.rand(num_tokens, num_v_heads, generator=generator).to(device, dtype)
    state = torch.full((num_slots, num_v_heads, k_dim, v_dim), float("nan"), device=device)
    for slot in batch.state_slots.read.tolist():
        if slot >= 0:
            state[slot] = torch.randn(state.shape[1:], generator=generator).to(device)
    return GatedDeltaRuleInputs(
        q.view(num_tokens, num_k_heads, k_dim),
        k.view(num_tokens, num_k_heads, k_dim),
        v.view(num_tokens, num_v_heads, v_dim),
        log_decay.to(device),
        beta,
        state,
        batch,
    )
