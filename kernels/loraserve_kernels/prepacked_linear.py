"""Linear layers with torch's oneDNN and with weights that are not repacked; see `packed_linear` for our own.

µs on two EPYC Zen 5 cores with avx512_bf16 and no AMX (with AMX plain `F.linear` was up to 9 times slower):

    dtype     K -> N        layer       1 row      4     16     32     64    256   1024
    bfloat16  768 -> 2048   F.linear       81     80    122    178    277    855   3268
                            prepacked      37     41     80    136    229    801   3172
                            row-major      29     32     71    138    259      F.linear
    bfloat16  2048 -> 768   F.linear       76     77    114    172    270    852   3382
                            prepacked      38     41     78    131    228    808   3252
                            row-major      45     42     90    179    327      F.linear
    bfloat16  768 -> 16000  F.linear      777    792   1073   1486   2220   6865  27073
                            prepacked     336    361    638   1018   1748   6267  25408
                            row-major     294    320    564   1028   1978      F.linear
    float32   768 -> 2048   F.linear      317    461    495    716   1165   3908  14910
                            prepacked      86     97    166    268    456   1623   6463
                            row-major      85     77    209    321    532      F.linear
    float32   2048 -> 768   F.linear      259    454    502    740   1173   3853  14560
                            prepacked      95     95    166    267    476   1645   6596
                            row-major     113    121    292    497    807      F.linear
    float32   768 -> 16000  F.linear     2605   4664   5005   7961  10401  33860 140087
                            prepacked     977    988   1376   2215   3698  13209  70183
                            row-major    1054   1340   1866   2936   7946      F.linear
"""

import torch
from torch import Tensor

from loraserve_kernels.checks import mismatch, require_like, require_rows
from loraserve_kernels.cpu_calls import DTYPE_CODES
from loraserve_kernels.cpu_library import CpuLibrary

PACKED_ROWS_HINT = 16
"""Row count that oneDNN is told to expect, that of decode batches. The packed layout works for any row count."""

ROW_MAJOR_MAX_ROWS = 64
"""With more rows, `F.linear`'s blocking is faster than `linear_rowmajor`."""


def check_linear(weight: Tensor, bias: Tensor | None) -> None:
    """Raise `ValueError` unless weight is [N, K] and bias [N], of one dtype and device."""
    if weight.dim() != 2:
        raise mismatch("weight", list(weight.shape), "[N, K]")
    if bias is not None:
        if bias.shape != weight.shape[:1]:
            raise mismatch("bias", list(bias.shape), f"[N] = [{weight.shape[0]}]")
        require_like("bias", bias, "weight", weight)


class PrepackedLinear:
    """x Wᵀ + bias with W in oneDNN's blocked layout; `F.linear` if there is no packed kernel.

    weight: [N, K], bias: [N] or None. float32 and bfloat16 on CPU are packed: the layer then owns a copy and the caller
    may free the weight. Otherwise the layer keeps a reference to the weight.

    If packed, a row's result does not depend on the number of rows, except in bfloat16 with AMX. Without AMX, oneDNN
    sums a lone row in another order for some shapes and CPUs (2 to 1,024 rows gave equal bits at every shape tried), so
    a lone row is then computed as two, which takes 0 to 20 % longer: in float32 if a probe shows a difference, in
    bfloat16 always, because rounding hides nearly all of them.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        check_linear(weight, bias)
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]
        self.dtype = weight.dtype
        self.bias = bias
        self.is_packed = can_prepack(weight)
        self.weight = pack(weight) if self.is_packed else weight.detach()
        is_rounded = weight.dtype == torch.bfloat16
        self.pads_lone_row = self.is_packed and (is_rounded or not self._lone_row_is_invariant())

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., K], rows may be strided -> [..., N], dense."""
        if not self.is_packed:
            return torch.nn.functional.linear(x, self.weight, self.bias)
        if x.shape[-1] != self.in_features or x.dtype != self.dtype:
            raise mismatch("x", f"{list(x.shape)} {x.dtype}", f"[..., {self.in_features}] {self.dtype}")
        if self.pads_lone_row and x.numel() == self.in_features:
            return self._compute(x.reshape(1, -1).expand(2, -1))[0].view(*x.shape[:-1], -1)
        return self._compute(x)

    def rows(self, indices: Tensor) -> Tensor:
        """See `Linear.rows`. A packed weight is unpacked whole into temporary memory."""
        return (self.weight.to_dense() if self.is_packed else self.weight)[indices]

    def _compute(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    def _lone_row_is_invariant(self) -> bool:
        """Whether eight random rows give the same bits one by one and together."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(8, self.in_features, generator=generator).to(self.dtype)
        return torch.equal(torch.cat([self._compute(row) for row in x.split(1)]), self._compute(x))


def can_prepack(weight: Tensor) -> bool:
    """Whether oneDNN has a packed kernel for this weight here."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and weight.numel() > 0
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and (weight.dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack(weight: Tensor) -> Tensor:
    """A blocked copy that shares no memory with weight."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKED_ROWS_HINT)


class RowMajorLinear:
    """x Wᵀ + bias straight from a row-major weight in C: for an `lm_head` that is in use elsewhere, or an adapter's.

    weight: [N, K], not copied. `F.linear` is used for more than `ROW_MAJOR_MAX_ROWS` rows, dtypes other than float32
    and bfloat16, weights that are not dense, other devices, and without a library. In C, a row's result does not depend
    on the number of rows, bit for bit.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, library: CpuLibrary | None = None) -> None:
        check_linear(weight, bias)
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]
        self.dtype = weight.dtype
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach().contiguous()
        self._code = DTYPE_CODES.get(weight.dtype, -1)
        usable = weight.device.type == "cpu" and weight.is_contiguous() and self._code >= 0
        self._c = library.functions if library is not None and usable else None

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., K] -> [..., N], newly allocated."""
        num_outputs, depth = self.weight.shape
        if x.shape[-1] != depth or x.dtype != self.weight.dtype:
            raise mismatch("x", f"{list(x.shape)} {x.dtype}", f"[..., {depth}] {self.weight.dtype}")
        if self._c is None or x.numel() > ROW_MAJOR_MAX_ROWS * depth:
            return torch.nn.functional.linear(x, self.weight, self.bias)
        rows = x.reshape(-1, depth)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        y = torch.empty((*x.shape[:-1], num_outputs), dtype=x.dtype)
        self._multiply(y.view(-1, num_outputs), rows)
        return y

    def multiply_into(self, y: Tensor, x: Tensor) -> None:
        """y = x Wᵀ + bias. x: [T, K], y: [T, N], rows may be strided, the last dimension is dense."""
        num_outputs, depth = self.weight.shape
        require_rows("x", x, depth)
        require_rows("y", y, num_outputs)
        for name, rows in (("x", x), ("y", y)):
            require_like(name, rows, "weight", self.weight)
        if len(x) != len(y):
            raise mismatch("y", list(y.shape), f"[{len(x)}, {num_outputs}], as x")
        if self._c is not None and len(x) <= ROW_MAJOR_MAX_ROWS:
            self._multiply(y, x)
        elif self.bias is not None:
            y.copy_(torch.nn.functional.linear(x, self.weight, self.bias))
        else:
            torch.mm(x, self.weight.T, out=y)  # without temporary memory, which a GPU may not have

    def _multiply(self, y: Tensor, x: Tensor) -> None:
        assert self._c is not None
        self._c.linear_rowmajor(
            y.data_ptr(),
            y.stride(0),
            x.data_ptr(),
            x.stride(0),
            x.shape[0],
            self.weight.data_ptr(),
            *self.weight.shape,
            None if self.bias is None else self.bias.data_ptr(),
            self._code,
            torch.get_num_threads(),
        )

    def rows(self, indices: Tensor) -> Tensor:
        """See `Linear.rows`."""
        return self.weight[indices]
