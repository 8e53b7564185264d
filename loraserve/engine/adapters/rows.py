"""The arena and its `AdapterTable`, and how the table's rows are written."""

import numpy as np
import torch
from loraserve_adapters.packed import ALIGNMENT_BYTES, PackedOwnTable, PackedTable
from loraserve_kernels.adapter_table import AdapterTable
from torch import Tensor

from loraserve.engine.device.accelerator import Accelerator


class AdapterRows:
    """The arena is empty at first; its memory is touched only as adapters are loaded."""

    def __init__(
        self,
        *,
        num_elements: int,
        num_rows: int,
        num_groups: int,
        num_members: int,
        dtype: torch.dtype,
        device: torch.device,
        accelerator: Accelerator | None,
    ) -> None:
        """num_elements: of the arena. accelerator: of the device; None on a CPU."""
        self._accelerator = accelerator
        self.table = AdapterTable(
            arena=_aligned_empty(num_elements, dtype, device),
            offset_a=torch.zeros((num_rows, num_groups), dtype=torch.int64, device=device),
            offset_b=torch.zeros((num_rows, num_members), dtype=torch.int64, device=device),
            lora_rank=torch.zeros((num_rows, num_members), dtype=torch.int32, device=device),
            scaling=torch.zeros((num_rows, num_members), dtype=torch.float32, device=device),
            offset_bias=torch.full((num_rows, num_members), -1, dtype=torch.int64, device=device),
            offset_magnitude=torch.full((num_rows, num_members), -1, dtype=torch.int64, device=device),
            offset_alignment=ALIGNMENT_BYTES // dtype.itemsize,
        )

    def write(self, adapter_slot: int, packed: PackedTable) -> None:
        """Write everything except the adapter's place in the arena."""
        self._copy(self.table.lora_rank[adapter_slot], packed.lora_rank.astype(np.int32))
        self._copy(self.table.scaling[adapter_slot], packed.scaling.astype(np.float32))

    def place(self, adapter_slot: int, start: int, packed: PackedTable) -> None:
        """start: of its extent, in elements."""
        self._copy(self.table.offset_a[adapter_slot], packed.offset_a + start)
        self._copy(self.table.offset_b[adapter_slot], packed.offset_b + start)
        # Unlike for the other offsets, a negative offset marks what is absent.
        for row, offsets in (
            (self.table.offset_bias[adapter_slot], packed.offset_bias),
            (self.table.offset_magnitude[adapter_slot], packed.offset_magnitude),
        ):
            self._copy(row, np.where(offsets >= 0, offsets + start, -1))
        if packed.own_tables:
            self.table.own_tables[adapter_slot] = {own.member: self._own_table(own, start) for own in packed.own_tables}

    def clear(self, adapter_slot: int) -> None:
        """Drop what is known to the host of an evicted adapter."""
        self.table.own_tables.pop(adapter_slot, None)

    def _own_table(self, own: PackedOwnTable, start: int) -> Tensor:
        first, size = start + own.offset, own.num_rows * own.hidden_size
        return self.table.arena[first : first + size].view(own.num_rows, own.hidden_size)

    def _copy(self, row: Tensor, values: np.ndarray) -> None:
        source = torch.from_numpy(values)
        if self._accelerator is None:
            row.copy_(source)
        else:
            # From memory that is not page-locked, the copy would wait for every step that is queued.
            locked = self._accelerator.host_buffer(values.nbytes).view(source.dtype)
            locked.copy_(source)
            self._accelerator.copy_to_device(row, locked)


def _aligned_empty(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialized and, on a CPU, not yet backed by memory; starts at a multiple of ALIGNMENT_BYTES."""
    spare = ALIGNMENT_BYTES // dtype.itemsize
    buffer = torch.empty(num_elements + spare, dtype=dtype, device=device)
    skip = -buffer.data_ptr() % ALIGNMENT_BYTES // dtype.itemsize
    return buffer[skip : skip + num_elements]
