"""`LatentOps` in C on CPU, in float32 and bfloat16; the reference serves float16."""

from collections.abc import Callable
from ctypes import addressof

import torch
from torch import Tensor

from loraserve_kernels.adapter_table import AdapterTable
from loraserve_kernels.checks import require_cpu
from loraserve_kernels.cpu_calls import DTYPE_CODES, LatentStruct
from loraserve_kernels.cpu_ops import CpuOps
from loraserve_kernels.latent import UpProjection, add_value_biases, check_absorb_keys, check_expand_values
from loraserve_kernels.latent_ops import ReferenceLatentOps
from loraserve_kernels.step_batch import Segments


class CpuLatentOps(CpuOps, ReferenceLatentOps):
    """On `torch.get_num_threads()` threads."""

    def absorb_keys(self, q: Tensor, up: UpProjection, table: AdapterTable | None, segments: Segments) -> Tensor:
        """See `LatentOps.absorb_keys`."""
        if q.dtype not in DTYPE_CODES:
            return super().absorb_keys(q, up, table, segments)
        check_absorb_keys(q, up, table, segments)
        rotary_dim = q.shape[2] - up.key_dim
        return self._run(self._c.absorb_keys, q, up, table, segments, rotary_dim, up.latent_dim + rotary_dim)

    def expand_values(self, x: Tensor, up: UpProjection, table: AdapterTable | None, segments: Segments) -> Tensor:
        """See `LatentOps.expand_values`."""
        if x.dtype not in DTYPE_CODES:
            return super().expand_values(x, up, table, segments)
        check_expand_values(x, up, table, segments)
        values = self._run(self._c.expand_values, x, up, table, segments, 0, up.value_dim)
        if table is not None and segments.has_adapter and table.num_biased:
            add_value_biases(values, up, table, segments)
        return values

    def _run(
        self,
        function: Callable[..., object],
        x: Tensor,
        up: UpProjection,
        table: AdapterTable | None,
        segments: Segments,
        rotary_dim: int,
        width: int,
    ) -> Tensor:
        """width: of the result, [T, num_heads, width]."""
        require_cpu("x", x)
        out = torch.empty((*x.shape[:2], width), dtype=x.dtype)
        adapters = None, None, None, None, 0
        if table is not None and segments.has_adapter:
            adapters = self._adapters(up.group, table, segments)
        problem = LatentStruct(
            x.data_ptr(),
            *x.stride()[:2],
            up.weight.data_ptr(),
            out.data_ptr(),
            *x.shape[:2],
            up.key_dim,
            up.value_dim,
            up.latent_dim,
            rotary_dim,
            *adapters,
        )
        function(addressof(problem), DTYPE_CODES[x.dtype], torch.get_num_threads())
        return out
