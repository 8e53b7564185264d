"""y += scaling * (x Aᵀ) B for the adapter of each row: shrink to the adapter's rank, then expand.

With DoRA each column of the sum is then multiplied by a factor, and a shift is added.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from loraserve_kernels.adapter_table import AdapterTable, LoraGroup
from loraserve_kernels.checks import mismatch, require_dense, require_like, require_rows
from loraserve_kernels.step_batch import Segments

POPULARITIES = ("identical", "distinct", "uniform", "zipf", "skewed")


def check_lora_add(y: Tensor, x: Tensor, group: LoraGroup, table: AdapterTable, segments: Segments) -> None:
    """Raise `ValueError` unless shapes, dtypes and devices are those of `Backend.lora_add`."""
    require_rows("x", x, group.in_features)
    require_rows("y", y, sum(group.out_features))
    if y.shape[0] != x.shape[0]:
        raise mismatch("y", f"{y.shape[0]} rows", f"{x.shape[0]}, as x")
    require_like("x", x, "the adapters", table.arena)
    require_like("y", y, "the adapters", table.arena)
    check_segments(segments)


def check_segments(segments: Segments) -> None:
    """Raise `ValueError` unless dtypes are those of `Segments` and there is one more start than there are slots."""
    require_dense("segments.start", segments.start, torch.int32)
    require_dense("segments.adapter_slot", segments.adapter_slot, torch.int32)
    if segments.start.shape[0] != segments.adapter_slot.shape[0] + 1:
        expected = f"num_segments + 1 = {segments.adapter_slot.shape[0] + 1}"
        raise mismatch("segments.start", f"{segments.start.shape[0]} entries", expected)


def check_adapter_table(group: LoraGroup, table: AdapterTable) -> None:
    """Raise `ValueError` unless the table has the group's columns in the dtypes `AdapterTable` states."""
    num_slots, num_members = table.lora_rank.shape
    has_dora = table.offset_magnitude.numel() > 0
    for name, dtype, columns in (
        ("offset_a", torch.int64, table.offset_a.shape[-1]),
        ("offset_b", torch.int64, num_members),
        ("lora_rank", torch.int32, num_members),
        ("scaling", torch.float32, num_members),
        *([("offset_magnitude", torch.int64, num_members)] if has_dora else []),
    ):
        tensor: Tensor = getattr(table, name)
        require_dense(f"table.{name}", tensor, dtype)
        if tensor.shape != (num_slots, columns):
            raise mismatch(f"table.{name}", list(tensor.shape), [num_slots, columns])
        if tensor.device != table.arena.device:
            raise mismatch(f"table.{name}.device", tensor.device, f"{table.arena.device}, as the arena")
    if not table.arena.is_contiguous():
        raise mismatch("table.arena", "strided", "dense")
    if group.group_index >= table.offset_a.shape[1]:
        raise mismatch("group_index", group.group_index, f"below the table's {table.offset_a.shape[1]} groups")
    if group.member_start + len(group.out_features) > num_members:
        raise mismatch("member_start", group.member_start, f"{len(group.out_features)} of {num_members} members")


def lora_shrink_reference(x: Tensor, a: Tensor) -> Tensor:
    """x: [T, in_features], a: [rank, in_features] -> float32 [T, rank]."""
    return x.float() @ a.float().T


def lora_expand_reference(hidden: Tensor, b: Tensor, scaling: float) -> Tensor:
    """hidden: float32 [T, rank], b: [rank, out_features] -> float32 [T, out_features]."""
    return scaling * (hidden @ b.float())


def lora_add_reference(y: Tensor, x: Tensor, group: LoraGroup, table: AdapterTable, segments: Segments) -> None:
    """`Backend.lora_add` in plain torch, one segment after the other."""
    starts, slots = segments.start.tolist(), segments.adapter_slot.tolist()
    for slot, first, end in zip(slots, starts[:-1], starts[1:], strict=True):
        if slot < 0 or first == end:
            continue
        members = range(group.member_start, group.member_start + len(group.out_features))
        ranks = table.lora_rank[slot, members.start : members.stop].tolist()
        if sum(ranks) == 0:
            continue
        a = matrix(table, int(table.offset_a[slot, group.group_index]), sum(ranks), group.in_features)
        hidden = lora_shrink_reference(x[first:end], a).split(ranks, dim=1)
        outputs = y[first:end].split(list(group.out_features), dim=1)
        for member, rank, h, out in zip(members, ranks, hidden, outputs, strict=True):
            if rank > 0:
                b = matrix(table, int(table.offset_b[slot, member]), rank, out.shape[1])
                total = out.float() + lora_expand_reference(h, b, float(table.scaling[slot, member]))
                magnitude = magnitude_of(table, slot, member, out.shape[1])
                out.copy_(total if magnitude is None else magnitude[0] * total + magnitude[1])


def matrix(table: AdapterTable, offset: int, num_rows: int, num_columns: int) -> Tensor:
    """A view of an adapter's matrix: [num_rows, num_columns]. Raises `ValueError` if it is not within the arena."""
    return _elements(table, offset, num_rows * num_columns).view(num_rows, num_columns)


def magnitude_of(table: AdapterTable, slot: int, member: int, out_features: int) -> Tensor | None:
    """A view of a member's factors and shifts: float32 [2, out_features]; None without DoRA."""
    offset = int(table.offset_magnitude[slot, member]) if table.offset_magnitude.numel() else -1
    if offset < 0:
        return None
    element_size = table.arena.element_size()
    if offset * element_size % 4:
        raise mismatch("adapter offset", offset, f"a multiple of 4 bytes in an arena of {table.arena.dtype}")
    elements = _elements(table, offset, 2 * out_features * 4 // element_size)
    return elements.view(torch.float32).view(2, out_features)


def _elements(table: AdapterTable, offset: int, size: int) -> Tensor:
    if not 0 <= offset <= table.arena.numel() - size:
        raise mismatch("adapter offset", offset, f"{size} elements within the arena's {table.arena.numel()}")
    return table.arena[offset : offset + size]


@dataclass(slots=True)
class LoraInputs:
    """Arguments of one `lora_add` call."""

    y: Tensor
    x: Tensor
    group: LoraGroup
    table: AdapterTable
    segments: Segments


def make_lora_inputs(
    segment_rows: list[int],
    segment_slots: list[int],
    slot_ranks: list[tuple[int, ...]],
    in_features: int,
    out_features: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    dora: Iterable[tuple[int, int]] = (),
) -> LoraInputs:
    """Random inputs. slot_ranks: per adapter one rank per member; 0 = absent, with invalid offsets.

    dora: (slot, member counted from the group's first) pairs with DoRA; everything else does not depend on it.
    x and y are slices of wider tensors, so their rows are strided. The arena has NaN between the matrices, and the
    group is not the table's first group and does not start at its first member.
    """
    generator = torch.Generator().manual_seed(seed)
    group = LoraGroup(group_index=1, member_start=2, in_features=in_features, out_features=out_features)
    num_slots, num_members = len(slot_ranks), 2 + len(out_features)
    table = AdapterTable(
        arena=torch.empty(0),
        offset_a=torch.full((num_slots, 2), -(1 << 60)),
        offset_b=torch.full((num_slots, num_members), -(1 << 60)),
        lora_rank=torch.full((num_slots, num_members), 1 << 20, dtype=torch.int32),
        scaling=torch.full((num_slots, num_members), float("nan")),
    )
    gap = torch.full((128,), float("nan"))
    pieces, size = [gap], gap.numel()

    def append(num_rows: int, num_columns: int, scale: float) -> int:
        nonlocal size
        offset = size
        pieces.extend([torch.randn(num_rows * num_columns, generator=generator) * scale, gap])
        size += num_rows * num_columns + gap.numel()
        return offset

    for slot, ranks in enumerate(slot_ranks):
        table.lora_rank[slot, 2:] = torch.tensor(ranks, dtype=torch.int32)
        if sum(ranks) > 0:
            table.offset_a[slot, 1] = append(sum(ranks), in_features, in_features**-0.5)
        for member, (rank, columns) in enumerate(zip(ranks, out_features, strict=True), start=2):
            if rank > 0:
                table.offset_b[slot, member] = append(rank, columns, rank**-0.5)
                table.scaling[slot, member] = 0.25 + 0.5 * torch.rand((), generator=generator)
    table.arena = torch.cat(pieces).to(device, dtype)
    for name in ("offset_a", "offset_b", "lora_rank", "scaling"):
        setattr(table, name, getattr(table, name).to(device))
    for slot, member in dora:
        add_magnitude(table, slot, group.member_start + member, out_features[member])
    num_rows = sum(segment_rows)
    x = torch.randn(num_rows, in_features + 3, generator=generator).to(device, dtype)[:, 1 : in_features + 1]
    y = torch.randn(num_rows, sum(out_features) + 5, generator=generator).to(device, dtype)[
        :, 2 : sum(out_features) + 2
    ]
    start = torch.tensor([0, *segment_rows], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    slots = torch.tensor(segment_slots, dtype=torch.int32, device=device)
    return LoraInputs(y, x, group, table, Segments(start, slots, has_adapter=any(slot >= 0 for slot in segment_slots)))


def add_magnitude(table: AdapterTable, slot: int, member: int, out_features: int) -> None:
    """Give a member DoRA: random factors around 1 and random shifts, appended to the arena between NaN."""
    if not table.offset_magnitude.numel():
        table.offset_magnitude = torch.full_like(table.offset_b, -1)
    generator = torch.Generator().manual_seed(1000 * slot + member)
    magnitude = torch.randn(2, out_features, generator=generator) * 0.25 + torch.tensor([[1.0], [0.0]])
    arena = table.arena
    gaps = [arena.new_full((size,), float("nan")) for size in (128 + arena.numel() % 2, 128)]
    table.offset_magnitude[slot, member] = arena.numel() + gaps[0].numel()
    table.arena = torch.cat([arena, gaps[0], magnitude.flatten().view(arena.dtype).to(arena.device), gaps[1]])


def make_popularity(popularity: str, num_rows: int, num_slots: int, seed: int = 0) -> tuple[list[int], list[int]]:
    """(segment_rows, segment_slots) of decode rows whose adapters follow one of `POPULARITIES`; slots ascend."""
    generator = torch.Generator().manual_seed(seed)
    if popularity == "identical":
        slots = torch.zeros(num_rows, dtype=torch.int64)
    elif popularity == "distinct":
        slots = torch.arange(num_rows) % num_slots
    else:
        order = torch.arange(1, num_slots + 1, dtype=torch.float64)
        weights = {"uniform": torch.ones_like(order), "zipf": 1 / order, "skewed": 0.1 ** (order - 1)}[popularity]
        slots = torch.multinomial(weights, num_rows, replacement=True, generator=generator)
    unique, counts = slots.sort().values.unique_consecutive(return_counts=True)
    return counts.tolist(), unique.tolist()
