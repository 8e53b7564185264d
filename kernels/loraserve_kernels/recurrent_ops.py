"""The ops of layers with a recurrent state instead of a KV cache: short convolutions, gated delta nets, Mamba-2."""

from typing import Protocol

from torch import Tensor

from loraserve_kernels.causal_conv import causal_conv_reference, check_causal_conv
from loraserve_kernels.gated_delta_rule import check_gated_delta_rule, gated_delta_rule_reference
from loraserve_kernels.selective_scan import check_selective_scan, selective_scan_reference
from loraserve_kernels.step_batch import StepBatch


class RecurrentOps(Protocol):
    """Each continues every sequence of a step from the state that the batch's `state_slots` name, and leaves the new
    state there."""

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, batch: StepBatch, *, silu: bool
    ) -> Tensor:
        """Depthwise convolution over each sequence's rows and the K - 1 rows before them, which its state holds.

        x: [T, C], any strides; weight: [C, K], row k of a sequence is multiplied by weight[:, K - 1]; bias: [C];
        state: [num_slots, K - 1, C], oldest row first; all in one dtype. silu: applied to the result.
        Returns [T, C]. Computed in float32 and rounded once.
        """
        ...

    def gated_delta_rule(
        self,
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
        """Linear attention with the gated delta rule (arXiv 2412.06464), one state for each of the value heads.

        For each row: state *= exp(log_decay); state += k ⊗ beta * (v - kᵀ state); output = qᵀ state / sqrt(k_dim).

        q, k: [T, num_k_heads, k_dim], v: [T, num_v_heads, v_dim], rows and heads may be strided; log_decay: float32
        [T, num_v_heads]; beta: [T, num_v_heads]; state: float32 [num_slots, num_v_heads, k_dim, v_dim].
        Value head h uses key head h // (num_v_heads // num_k_heads). normalize: q and k are first divided by
        sqrt(their sum of squares + 1e-6). Returns [T, num_v_heads, v_dim] in v's dtype. Computed in float32.
        """
        ...

    def selective_scan(
        self,
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
        """The state space of Mamba-2 (arXiv 2405.21060), one state for each head.

        For each row: dt = clamp(softplus(dt + dt_bias), *dt_limit); state = exp(dt * a) * state + dt * x ⊗ b;
        output = state c + d * x.

        x: [T, num_heads, head_dim], b, c: [T, num_groups, state_dim], dt: [T, num_heads], all but the last dimension
        may be strided; a, d, dt_bias: [num_heads]; state: float32 [num_slots, num_heads, head_dim, state_dim].
        Head h uses group h // (num_heads // num_groups). Returns float32 [T, num_heads, head_dim]. Computed in float32.
        """
        ...


class ReferenceRecurrentOps:
    """`RecurrentOps` in plain torch, on any device."""

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, batch: StepBatch, *, silu: bool
    ) -> Tensor:
        """See `RecurrentOps.causal_conv`."""
        check_causal_conv(x, weight, bias, state, batch)
        return causal_conv_reference(x, weight, bias, state, batch, silu=silu)

    def gated_delta_rule(
        self,
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
        """See `RecurrentOps.gated_delta_rule`."""
        check_gated_delta_rule(q, k, v, log_decay, beta, state, batch)
        return gated_delta_rule_reference(q, k, v, log_decay, beta, state, batch, normalize=normalize)

    def selective_scan(
        self,
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
        """See `RecurrentOps.selective_scan`."""
        check_selective_scan(x, dt, a, b, c, d, dt_bias, state, batch)
        return selective_scan_reference(x, dt, a, b, c, d, dt_bias, state, batch, softplus=softplus, dt_limit=dt_limit)
