"""LoRA on mixtures of experts: each pair of a token and an expert uses its adapter's matrices for that expert.

An adapter's A matrices for all experts are adjacent, `[num_experts * rank, in_features]`, and so are its B matrices,
`[num_experts * rank, out_features]`. Each call builds a small table in which every combination of adapter and expert is
an adapter, so `Backend.lora_add` need not know about experts.
"""

from dataclasses import dataclass
from functools import cache
from math import gcd

import torch
from torch import Tensor

from loraserve_kernels.adapter_table import AdapterTable, LoraGroup
from loraserve_kernels.backend import Backend
from loraserve_kernels.step_batch import Segments


@dataclass(frozen=True, slots=True)
class ExpertPairs:
    """Pairs of a token and an expert it is routed to, ordered by expert, within one expert by token."""

    adapter_slot: Tensor
    """int64 [N], for each row of the table to build; -1 = base model."""
    expert: Tensor
    """int64 [N], likewise."""
    segments: Segments
    """Segments of the pairs; their slots are rows of that table."""


def pair_up(segments: Segments, num_tokens: int, token: Tensor, expert: Tensor) -> ExpertPairs:
    """segments: of the batch's tokens. token, expert: int64 [P], of each pair.

    A segment is a run of pairs of one expert and one adapter. If there are tiles, as in a GPU's batch, each pair is a
    segment and a tile: launches then depend on shapes alone, and the host never waits for the GPU.
    """
    slot = _slot_of_tokens(segments, num_tokens)[token]
    num_pairs = len(token)
    if segments.tiles is None:
        is_first = torch.ones(num_pairs, dtype=torch.bool, device=token.device)
        is_first[1:] = (slot[1:] != slot[:-1]) | (expert[1:] != expert[:-1])
        first = is_first.nonzero()[:, 0]
        start = torch.cat([first, first.new_tensor([num_pairs])]).int()
        slot = slot[first]
        row = torch.arange(len(first), dtype=torch.int32, device=token.device).where(slot >= 0, -1)
        return ExpertPairs(slot, expert[first], Segments(start, row, segments.has_adapter))
    start = torch.arange(num_pairs + 1, dtype=torch.int32, device=token.device)
    row, end = start[:-1], start[1:]
    tiles = torch.stack([row, row, end, row, row, end], dim=1)
    return ExpertPairs(slot, expert, Segments(start, row, segments.has_adapter, tiles))


def lora_add_experts(
    backend: Backend, y: Tensor, x: Tensor, group: LoraGroup, table: AdapterTable, pairs: ExpertPairs
) -> None:
    """`Backend.lora_add` for rows that are pairs: x: [P, in_features], y: [P, out_features], changed in place.

    group: has one member, with matrices for each expert.
    """
    own_table = _table_of(group, table, pairs)
    if y.is_cpu and pairs.segments.tiles is None and not own_table.lora_rank.any():
        return
    backend.lora_add(y, x, _own_group(group.in_features, group.out_features), own_table, pairs.segments)


@cache
def _own_group(in_features: int, out_features: tuple[int, ...]) -> LoraGroup:
    """The group of a table built for a call. Cached per shape, because backends keep state per group object."""
    return LoraGroup(0, 0, in_features, out_features)


def _table_of(group: LoraGroup, table: AdapterTable, pairs: ExpertPairs) -> AdapterTable:
    slot, member, (out_features,) = pairs.adapter_slot.clamp(min=0), group.member_start, group.out_features
    lora_rank = table.lora_rank[slot, member] * (pairs.adapter_slot >= 0)
    first_row = pairs.expert * lora_rank
    return AdapterTable(
        arena=table.arena,
        offset_a=(table.offset_a[slot, group.group_index] + first_row * group.in_features)[:, None],
        offset_b=(table.offset_b[slot, member] + first_row * out_features)[:, None],
        lora_rank=lora_rank[:, None],
        scaling=table.scaling[slot, member][:, None],
        offset_alignment=gcd(table.offset_alignment, group.in_features, out_features),
    )


def _slot_of_tokens(segments: Segments, num_tokens: int) -> Tensor:
    """int64 [num_tokens], -1 = base model. From the tiles if there are any, since graphs read nothing else."""
    if segments.tiles is None:
        counts = segments.start.diff()
        return segments.adapter_slot.long().repeat_interleave(counts, output_size=num_tokens)
    slot, first, end = segments.tiles[:, :3].unbind(1)
    token = torch.arange(num_tokens, dtype=torch.int32, device=slot.device)
    # Unused entries, which come last, end at 0.
    tile = torch.searchsorted(first.where(end > 0, num_tokens), token, right=True) - 1
    is_within = (tile >= 0) & (token < end[tile])
    return slot[tile].where(is_within, -1).long()
