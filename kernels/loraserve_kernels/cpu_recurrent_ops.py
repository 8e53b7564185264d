"""`RecurrentOps` in C on CPU, in float32 and bfloat16; the reference serves float16 and very long convolutions."""

from ctypes import addressof

import torch
from torch import Tensor

from loraserve_kernels.causal_conv import check_causal_conv
from loraserve_kernels.checks import require_cpu
from loraserve_kernels.cpu_calls import (
    DTYPE_CODES,
    MAX_TAPS,
    CausalConvStruct,
    GatedDeltaRuleStruct,
    SelectiveScanStruct,
    SequencesStruct,
)
from loraserve_kernels.cpu_ops import CpuOps
from loraserve_kernels.gated_delta_rule import check_gated_delta_rule
from loraserve_kernels.recurrent_ops import ReferenceRecurrentOps
from loraserve_kernels.selective_scan import check_selective_scan
from loraserve_kernels.step_batch import StepBatch


class CpuRecurrentOps(CpuOps, ReferenceRecurrentOps):
    """On `torch.get_num_threads()` threads. If a slot or a row does not exist, nothing is written; rows that belong to
    no sequence are left undefined."""

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, batch: StepBatch, *, silu: bool
    ) -> Tensor:
        """See `RecurrentOps.causal_conv`. Fastest if x's channels are adjacent; otherwise x is copied."""
        code = DTYPE_CODES.get(x.dtype)
        if code is None or weight.shape[-1] > MAX_TAPS:
            return super().causal_conv(x, weight, bias, state, batch, silu=silu)
        check_causal_conv(x, weight, bias, state, batch)
        require_cpu("x", x)
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        problem = CausalConvStruct(
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            state.data_ptr(),
            out.data_ptr(),
            *weight.shape,
            silu,
            _sequences(batch, x, state),
        )
        self._c.causal_conv(addressof(problem), code, torch.get_num_threads())
        return out

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
        code = DTYPE_CODES.get(v.dtype)
        if code is None:
            return super().gated_delta_rule(q, k, v, log_decay, beta, state, batch, normalize=normalize)
        check_gated_delta_rule(q, k, v, log_decay, beta, state, batch)
        require_cpu("v", v)
        out = torch.empty(v.shape, dtype=v.dtype)
        problem = GatedDeltaRuleStruct(
            q.data_ptr(),
            *q.stride()[:2],
            k.data_ptr(),
            *k.stride()[:2],
            v.data_ptr(),
            *v.stride()[:2],
            log_decay.data_ptr(),
            log_decay.stride(0),
            beta.data_ptr(),
            beta.stride(0),
            state.data_ptr(),
            out.data_ptr(),
            k.shape[1],
            *state.shape[1:],
            normalize,
            _sequences(batch, v, state),
        )
        self._c.gated_delta_rule(addressof(problem), code, torch.get_num_threads())
        return out

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
        """See `RecurrentOps.selective_scan`. Fastest if a, d and dt_bias are float32; otherwise they are converted."""
        code = DTYPE_CODES.get(x.dtype)
        if code is None:
            return super().selective_scan(
                x, dt, a, b, c, d, dt_bias, state, batch, softplus=softplus, dt_limit=dt_limit
            )
        check_selective_scan(x, dt, a, b, c, d, dt_bias, state, batch)
        require_cpu("x", x)
        out = torch.empty(x.shape, dtype=torch.float32)
        of_heads = [None if tensor is None else tensor.to(torch.float32).contiguous() for tensor in (a, d, dt_bias)]
        problem = SelectiveScanStruct(
            x.data_ptr(),
            *x.stride()[:2],
            dt.data_ptr(),
            dt.stride(0),
            b.data_ptr(),
            *b.stride()[:2],
            c.data_ptr(),
            *c.stride()[:2],
            *[None if tensor is None else tensor.data_ptr() for tensor in of_heads],
            state.data_ptr(),
            out.data_ptr(),
            x.shape[1],
            b.shape[1],
            *state.shape[2:],
            softplus,
            *dt_limit,
            _sequences(batch, x, state),
        )
        self._c.selective_scan(addressof(problem), code, torch.get_num_threads())
        return out


def _sequences(batch: StepBatch, rows: Tensor, state: Tensor) -> SequencesStruct:
    slots = batch.state_slots
    assert slots is not None
    return SequencesStruct(
        batch.row_start.data_ptr(),
        batch.num_rows.data_ptr(),
        slots.read.data_ptr(),
        slots.write.data_ptr(),
        slots.save.data_ptr(),
        slots.num_rows_saved.data_ptr(),
        batch.num_rows.shape[0],
        rows.shape[0],
        state.shape[0],
    )
