"""The addresses of an adapter table's columns, for C functions."""

import ctypes
from ctypes import addressof
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from loraserve_kernels.adapter_table import AdapterTable, LoraGroup
from loraserve_kernels.checks import require_cpu
from loraserve_kernels.cpu_calls import AdapterTableStruct, LoraGroupStruct
from loraserve_kernels.lora_add import check_adapter_table


@dataclass(slots=True)
class BoundGroup:
    """A group with the addresses of its columns in one table; keeps alive what they point to."""

    group: LoraGroup
    tensors: tuple[Tensor, ...]
    structs: tuple[Any, ...]
    group_address: int
    table_address: int

    def is_for(self, group: LoraGroup, table: AdapterTable) -> bool:
        """Whether the addresses still belong to this group and these tensors."""
        arena, offset_a, offset_b, lora_rank, scaling, offset_magnitude = self.tensors
        return (
            self.group is group
            and table.arena is arena
            and table.offset_a is offset_a
            and table.offset_b is offset_b
            and table.lora_rank is lora_rank
            and table.scaling is scaling
            and table.offset_magnitude is offset_magnitude
        )


class BoundGroups:
    """The groups that a backend has been called with, each bound to the table of its last call."""

    def __init__(self) -> None:
        self._bound: dict[int, BoundGroup] = {}

    def __len__(self) -> int:
        return len(self._bound)

    def find(self, group: LoraGroup, table: AdapterTable) -> BoundGroup:
        """Binds the group if it is new or the table has changed."""
        bound = self._bound.get(id(group))
        if bound is None or not bound.is_for(group, table):
            bound = self._bound[id(group)] = bind_group(group, table)
        return bound


def bind_group(group: LoraGroup, table: AdapterTable) -> BoundGroup:
    """Check the table and take the addresses of the group's columns."""
    check_adapter_table(group, table)
    require_cpu("table.arena", table.arena)
    out_features = (ctypes.c_int64 * len(group.out_features))(*group.out_features)
    group_struct = LoraGroupStruct(group.in_features, len(group.out_features), addressof(out_features))
    member = group.member_start
    table_struct = AdapterTableStruct(
        table.arena.data_ptr(),
        table.arena.numel(),
        table.offset_a.data_ptr() + 8 * group.group_index,
        table.offset_a.stride(0),
        table.offset_b.data_ptr() + 8 * member,
        table.lora_rank.data_ptr() + 4 * member,
        table.scaling.data_ptr() + 4 * member,
        table.lora_rank.stride(0),
        table.lora_rank.shape[0],
        table.offset_magnitude.data_ptr() + 8 * member if table.offset_magnitude.numel() else None,
        4 // table.arena.element_size(),
    )
    return BoundGroup(
        group,
        (table.arena, table.offset_a, table.offset_b, table.lora_rank, table.scaling, table.offset_magnitude),
        (out_features, group_struct, table_struct),
        addressof(group_struct),
        addressof(table_struct),
    )
