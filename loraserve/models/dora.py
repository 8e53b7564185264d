"""DoRA: an adapter's magnitudes as factors on the outputs of the base's linears, computed once, at load.

PEFT scales each output's weights, W + scaling * B A, to that output's magnitude. So y = W x + bias becomes
factor * (W x + scaling * B A x) + bias, with factor = magnitude / |W + scaling * B A|. The norm needs no second copy of
the weights:

    |W + s B A|² = |W|² + 2 s (W Aᵀ) · B + s² (B A Aᵀ) · B

|W|² is computed when the base is loaded, and W Aᵀ is the base's linear applied to the rows of A. For a rank-16 adapter
that costs as much as the linears of a 16-token prompt, or of a 48-token one if q, k and v are one linear.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from loraserve_adapters.packed import PackedTable
from loraserve_kernels.adapter_table import LoraGroup
from loraserve_kernels.linear import Linear
from torch import Tensor

_PIECE = 1 << 16
"""Weights squared per pass, few enough to stay in a cache. On two cores 16 M in bfloat16 take 5 ms this way, and 23 ms
with `torch.linalg.vector_norm`."""
_MAX_ROWS = 64
"""Rows of A multiplied per pass, which bounds the memory needed for `lm_head`."""
_ENLARGED = 40
"""Exponent of two. Beside products of that size, a bias below 2**16 is rounded away in float32."""


def squared_norms(weight: Tensor, rounded: Callable[[Tensor], Tensor] | None) -> Tensor:
    """|W|² of each output: [out_features, in_features] → float32 [out_features]. rounded: gives the values that
    the linear multiplies with; None = the weight's own."""
    if rounded is None and weight.device.type != "cpu":
        return torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square_()
    norms = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    num_rows = max(1, _PIECE // weight.shape[1])
    for squared, piece in zip(norms.split(num_rows), weight.split(num_rows), strict=True):
        values = piece if rounded is None else rounded(piece)
        torch.sum(values.float().square(), 1, out=squared)
    return norms


@dataclass(frozen=True, slots=True)
class DoraGroup:
    """Linears of the base that share an input, computed as one."""

    linear: Linear
    bias: Tensor | None
    """[sum(out_features)]; the linear adds it."""
    squared_norms: Tensor
    """float32 [sum(out_features)], of the values that the linear multiplies with."""
    lora_group: LoraGroup

    def find_factors(self, table: PackedTable, values: Tensor) -> None:
        """Overwrite magnitudes with factors and the zeros after them with shifts; see `AdapterTable.offset_magnitude`.

        values: [num_elements], a packed adapter.
        """
        members = [member for member in self._members(table, values) if member.offset_magnitude >= 0]
        if not members:
            return
        squared = self.squared_norms.double()
        num_rows = max(member.rows.stop for member in members)
        a = _matrix(values, int(table.offset_a[self.lora_group.group_index]), num_rows, self.lora_group.in_features)
        for first in range(0, num_rows, _MAX_ROWS):
            rows = slice(first, min(first + _MAX_ROWS, num_rows))
            products = self._times_weight(a[rows])
            with _one_thread():
                for member in members:
                    _add_products(squared[member.outputs], products[:, member.outputs], rows, a, member)
        with _one_thread():
            norms = squared.clamp_(min=0).sqrt_()
            for member in members:
                num_outputs = member.b.shape[1]
                num_elements = 2 * num_outputs * torch.float32.itemsize // values.itemsize
                place = slice(member.offset_magnitude, member.offset_magnitude + num_elements)
                factors, added = values[place].view(torch.float32).view(2, num_outputs)
                of_member = norms[member.outputs]
                factors.copy_(torch.where(of_member > 0, factors / of_member, 0))
                if self.bias is not None:
                    added.copy_(self.bias[member.outputs].float() * (1 - factors))

    def _members(self, table: PackedTable, values: Tensor) -> Iterator["_Member"]:
        first_row = first_output = 0
        for member, num_outputs in enumerate(self.lora_group.out_features, start=self.lora_group.member_start):
            rank = int(table.lora_rank[member])
            if rank > 0:
                yield _Member(
                    rows=slice(first_row, first_row + rank),
                    outputs=slice(first_output, first_output + num_outputs),
                    b=_matrix(values, int(table.offset_b[member]), rank, num_outputs),
                    scaling=float(table.scaling[member]),
                    offset_magnitude=int(table.offset_magnitude[member]),
                )
            first_row += rank
            first_output += num_outputs

    def _times_weight(self, a: Tensor) -> Tensor:
        """A Wᵀ without the bias: [rank, sum(out_features)], as precise as the linear's own products."""
        if self.bias is None and a.dtype is not torch.float16:
            return self.linear(a)
        with _one_thread():
            enlarged = self._enlargements(a)
            rows = (a * enlarged).to(a.dtype)
        products = self.linear(rows)
        with _one_thread():
            return (products if self.bias is None else products.double() - self.bias) / enlarged

    def _enlargements(self, a: Tensor) -> Tensor:
        """A factor for each row: float64 [rank, 1], powers of two, so that multiplying is exact.

        Large enough that the bias costs the result no digits, but below 1 if the products would overflow the dtype.
        """
        rows = a.double()  # squares of values may overflow float32
        largest = torch.maximum(rows.norm(dim=1) * self.squared_norms.max().double().sqrt(), rows.abs().amax(dim=1))
        room = min(math.log2(torch.finfo(a.dtype).max / 8), _ENLARGED) - largest.clamp_(min=1e-30).log2_()
        return room.floor_().clamp_(max=0 if self.bias is None else math.inf).exp2_()[:, None]


@dataclass(frozen=True, slots=True)
class _Member:
    """The adapter's part in one linear of the group."""

    rows: slice
    """Its rows in the group's A."""
    outputs: slice
    b: Tensor
    """[rank, its outputs]."""
    scaling: float
    offset_magnitude: int

    def b_of(self, rows: slice) -> Tensor:
        """The rows of B that belong to these rows of the group's A: float64."""
        return self.b[rows.start - self.rows.start : rows.stop - self.rows.start].double()


def _add_products(squared: Tensor, products: Tensor, rows: slice, a: Tensor, member: _Member) -> None:
    """Add to the member's |W|² the share of these rows of A in (2 s W Aᵀ + s² B A Aᵀ) · B.

    Computed in float64, which no adapter's values overflow: in float32 the square of an alpha of 1e20 would.
    squared: float64 [outputs], added to. products: [rows, outputs], A Wᵀ of these rows of the group's A.
    """
    first, end = max(rows.start, member.rows.start), min(rows.stop, member.rows.stop)
    if first >= end:
        return
    total = 2 * member.scaling * products[first - rows.start : end - rows.start].double()
    for other in range(member.rows.start, member.rows.stop, _MAX_ROWS):
        others = slice(other, min(other + _MAX_ROWS, member.rows.stop))
        gram = a[first:end].double() @ a[others].double().T
        total.addmm_(gram, member.b_of(others), alpha=member.scaling**2)
    squared += total.mul_(member.b_of(slice(first, end))).sum(0)


def find_factors(groups: Sequence[DoraGroup], table: PackedTable, values: Tensor) -> None:
    """`DoraGroup.find_factors` for all of an adapter's linears."""
    with torch.inference_mode():
        for group in groups:
            group.find_factors(table, values)


@contextmanager
def _one_thread() -> Iterator[None]:
    """For torch operations of about 0.1 ms. While something else occupies one of two cores, such as an engine step or
    the API, threads that wait for each other take a hundred times as long (ADR 11)."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _matrix(values: Tensor, offset: int, num_rows: int, num_columns: int) -> Tensor:
    return values[offset : offset + num_rows * num_columns].view(num_rows, num_columns)
