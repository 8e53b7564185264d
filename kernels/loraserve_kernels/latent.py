"""Multi-head latent attention (arXiv 2405.04434) with the up-projection absorbed into queries and outputs.

Keys and values of all heads are a linear's outputs, `[k_h | v_h] = W_h c` for the latent c of a token. Instead of them
the KV cache holds c and the part of a key that all heads share and that is rotated. A query's scores are
`q_h · (W_kh c) = (W_khᵀ q_h) · c`, and what attention returns is `W_vh` times the weighted sum of latents.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from loraserve_kernels.adapter_table import AdapterTable, LoraGroup
from loraserve_kernels.checks import mismatch, require_dense, require_dense_last, require_like
from loraserve_kernels.lora_add import check_segments, magnitude_of, make_lora_inputs, matrix
from loraserve_kernels.step_batch import Segments


@dataclass(frozen=True, slots=True)
class UpProjection:
    """The linear from latents to keys and values, and the place of its adapters."""

    weight: Tensor
    """[num_heads * (key_dim + value_dim), latent_dim], dense: for each head the outputs of its key, then its value."""
    num_heads: int
    key_dim: int
    """Of the keys' part that comes from latents."""
    group: LoraGroup
    """Has one member, the linear."""

    @property
    def latent_dim(self) -> int:
        return self.weight.shape[1]

    @property
    def value_dim(self) -> int:
        return self.weight.shape[0] // self.num_heads - self.key_dim

    def halves(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """[..., outputs] → [..., num_heads, key_dim] and [..., num_heads, value_dim]."""
        keys, values = outputs.unflatten(-1, (self.num_heads, -1)).split([self.key_dim, self.value_dim], dim=-1)
        return keys, values


def check_absorb_keys(q: Tensor, up: UpProjection, table: AdapterTable | None, segments: Segments) -> None:
    """Raise `ValueError` unless shapes, dtypes and devices are those of `LatentOps.absorb_keys`."""
    if q.dim() != 3 or q.shape[1] != up.num_heads or q.shape[2] < up.key_dim:
        raise mismatch("q", list(q.shape), f"[T, {up.num_heads}, at least {up.key_dim}]")
    _check_rows("q", q, up, table, segments)


def check_expand_values(x: Tensor, up: UpProjection, table: AdapterTable | None, segments: Segments) -> None:
    """Raise `ValueError` unless shapes, dtypes and devices are those of `LatentOps.expand_values`."""
    if x.dim() != 3 or x.shape[1] != up.num_heads or x.shape[2] < up.latent_dim:
        raise mismatch("x", list(x.shape), f"[T, {up.num_heads}, at least {up.latent_dim}]")
    _check_rows("x", x, up, table, segments)


def _check_rows(name: str, rows: Tensor, up: UpProjection, table: AdapterTable | None, segments: Segments) -> None:
    require_dense_last(name, rows)
    require_dense("weight", up.weight, rows.dtype)
    require_like("weight", up.weight, name, rows)
    if up.weight.dim() != 2 or up.weight.shape[0] % up.num_heads or up.value_dim < 1 or up.key_dim < 1:
        expected = f"a multiple of {up.num_heads} outputs, more than {up.key_dim} for each head"
        raise mismatch("weight", list(up.weight.shape), expected)
    of_group = up.group.in_features, *up.group.out_features
    if of_group != (up.latent_dim, up.weight.shape[0]):
        raise mismatch("group", list(of_group), f"{[up.latent_dim, up.weight.shape[0]]}, as weight")
    check_segments(segments)
    if table is not None and segments.has_adapter:
        require_like("the adapters", table.arena, name, rows)


def absorb_keys_reference(q: Tensor, up: UpProjection, table: AdapterTable | None, segments: Segments) -> Tensor:
    """`LatentOps.absorb_keys` in plain torch."""
    keys = q[..., : up.key_dim].to(torch.float32, copy=True)
    for rows, lora in _adapted(up, table, segments):
        if lora.magnitude is not None:
            keys[rows] *= up.halves(lora.magnitude)[0][0]
    weight = up.halves(up.weight.float().t())[0]  # [latent_dim, num_heads, key_dim]
    latents = torch.einsum("thk,chk->thc", keys, weight)
    for rows, lora in _adapted(up, table, segments):
        hidden = torch.einsum("thk,rhk->thr", keys[rows], up.halves(lora.b)[0])
        latents[rows] += lora.scaling * hidden @ lora.a
    return torch.cat([latents.to(q.dtype), q[..., up.key_dim :]], dim=2)


def expand_values_reference(x: Tensor, up: UpProjection, table: AdapterTable | None, segments: Segments) -> Tensor:
    """`LatentOps.expand_values` in plain torch."""
    latents = x[..., : up.latent_dim].float()
    weight = up.halves(up.weight.float().t())[1]  # [latent_dim, num_heads, value_dim]
    values = torch.einsum("thc,chv->thv", latents, weight)
    for rows, lora in _adapted(up, table, segments):
        values[rows] += lora.scaling * torch.einsum("thr,rhv->thv", latents[rows] @ lora.a.t(), up.halves(lora.b)[1])
        if lora.magnitude is not None:
            factors, shifts = up.halves(lora.magnitude)[1]
            values[rows] = factors * values[rows] + shifts
    return values.to(x.dtype)


def add_value_biases(values: Tensor, up: UpProjection, table: AdapterTable, segments: Segments) -> None:
    """values: [T, num_heads, value_dim] += scaling * bias, of the adapters whose B has one.

    The weights of a row's values add up to 1. A bias of keys changes all scores of a query by the same number, which
    the softmax ignores.
    """
    (columns,), member = up.group.out_features, up.group.member_start
    for rows, slot in _rows_of_slots(segments):
        offset = int(table.offset_bias[slot, member])
        if offset >= 0:
            bias = matrix(table, offset, 1, columns)[0].float() * table.scaling[slot, member]
            values[rows] = (values[rows].float() + up.halves(bias)[1]).to(values.dtype)


@dataclass(frozen=True, slots=True)
class _Lora:
    a: Tensor
    """float32 [rank, latent_dim]."""
    b: Tensor
    """float32 [rank, outputs]."""
    scaling: float
    magnitude: Tensor | None
    """float32 [2, outputs]: factors and shifts."""


def _adapted(up: UpProjection, table: AdapterTable | None, segments: Segments) -> list[tuple[slice, _Lora]]:
    """Each run of rows whose adapter has the linear, with its matrices."""
    found: list[tuple[slice, _Lora]] = []
    if table is None or not segments.has_adapter:
        return found
    (columns,), member = up.group.out_features, up.group.member_start
    for rows, slot in _rows_of_slots(segments):
        rank = int(table.lora_rank[slot, member])
        if rank > 0:
            a = matrix(table, int(table.offset_a[slot, up.group.group_index]), rank, up.latent_dim).float()
            b = matrix(table, int(table.offset_b[slot, member]), rank, columns).float()
            scaling, magnitude = float(table.scaling[slot, member]), magnitude_of(table, slot, member, columns)
            found.append((rows, _Lora(a, b, scaling, magnitude)))
    return found


def _rows_of_slots(segments: Segments) -> list[tuple[slice, int]]:
    starts, slots = segments.start.tolist(), segments.adapter_slot.tolist()
    runs = zip(starts[:-1], starts[1:], slots, strict=True)
    return [(slice(first, end), slot) for first, end, slot in runs if slot >= 0 and first < end]


@dataclass(slots=True)
class LatentInputs:
    """Arguments of one call of each op."""

    q: Tensor
    """For `absorb_keys`."""
    x: Tensor
    """For `expand_values`."""
    up: UpProjection
    table: AdapterTable
    segments: Segments


def make_latent_inputs(
    segment_rows: list[int],
    segment_slots: list[int],
    slot_ranks: list[int],
    num_heads: int,
    key_dim: int,
    value_dim: int,
    latent_dim: int,
    rotary_dim: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    dora: tuple[int, ...] = (),
) -> LatentInputs:
    """Random inputs; the table as in `make_lora_inputs`. The rows of q and x are strided, and x has more than latents.

    slot_ranks: one per adapter, 0 = without this linear. dora: slots.
    """
    outputs = num_heads * (key_dim + value_dim)
    lora = make_lora_inputs(
        segment_rows,
        segment_slots,
        [(rank,) for rank in slot_ranks],
        latent_dim,
        (outputs,),
        dtype=dtype,
        seed=seed,
        dora=[(slot, 0) for slot in dora],
    )
    generator = torch.Generator().manual_seed(seed + 1)
    weight = torch.randn(outputs, latent_dim, generator=generator).mul_(latent_dim**-0.5).to(dtype)
    total = sum(segment_rows)

    def rows(width: int) -> Tensor:
        return torch.randn(total, num_heads + 1, width, generator=generator).to(dtype)[:, :num_heads]

    up = UpProjection(weight, num_heads, key_dim, lora.group)
    return LatentInputs(rows(key_dim + rotary_dim), rows(latent_dim + rotary_dim), up, lora.table, lora.segments)
