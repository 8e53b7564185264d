"""Packed adapters for `AdapterMemory` in which every element identifies its adapter."""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from loraserve_adapters.packed import ALIGNMENT_BYTES, PackedAdapter, PackedOwnTable, PackedTable, PackedTokens
from loraserve_adapters.packed_file import write_packed

from loraserve.engine.adapters.memory import AdapterMemory, FinishAdapter
from loraserve.engine.device.accelerator import Accelerator

LAYOUT = "layout-of-the-tests"
UNIT = ALIGNMENT_BYTES // 4
"""Elements per unit."""


@dataclass(frozen=True, slots=True)
class TinyAdapter:
    """Takes `num_units` * 256 bytes of float32, all equal to `value`."""

    value: int
    num_units: int
    is_dora: bool = False
    """Its last two elements are the DoRA vectors of its one member."""
    has_tokens: bool = False
    """Its B is the rows of a trained token."""
    has_table: bool = False
    """Its last two elements are an own table of two rows."""

    @property
    def digest(self) -> str:
        return sha256(f"adapter {self.value} of {self.num_units} units".encode()).hexdigest()

    @property
    def size_bytes(self) -> int:
        return self.num_units * ALIGNMENT_BYTES

    def write(self, folder: Path, layout_fingerprint: str = LAYOUT) -> Path:
        """One group of one member: A starts at byte 0, B at byte 128."""
        path = folder / f"{self.digest}.packed"
        offset_magnitude = self.num_units * UNIT - 2 if self.is_dora else -1
        payload = np.full(self.size_bytes // 4, self.value, np.float32)
        table = PackedTable(
            layout_fingerprint=layout_fingerprint,
            dtype="float32",
            max_lora_rank=self.num_units,
            offset_a=np.array([0], np.int64),
            offset_b=np.array([32], np.int64),
            offset_bias=np.array([-1], np.int64),
            offset_magnitude=np.array([offset_magnitude], np.int64),
            lora_rank=np.array([self.num_units], np.int32),
            scaling=np.array([self.value / 2], np.float32),
            trained_tokens=(PackedTokens(0, (1,)),) if self.has_tokens else (),
            own_tables=(PackedOwnTable(0, 0, self.num_units * UNIT - 2, 2, 1),) if self.has_table else (),
        )
        write_packed(PackedAdapter(self.digest, table, payload.view(np.uint8)), path)
        return path


def damage(path: Path) -> None:
    """Change the payload's last byte."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 0xFF
    path.write_bytes(content)


def make_adapter_memory(
    num_units: int,
    max_resident: int = 8,
    accelerator: Accelerator | None = None,
    host_tier_units: int = 0,
    finish: FinishAdapter | None = None,
    background_bytes: int | None = None,
) -> AdapterMemory:
    """An arena of `num_units` * 256 bytes, and a host tier of `host_tier_units` * 256 bytes."""
    return AdapterMemory(
        num_groups=1,
        num_members=1,
        layout_fingerprint=LAYOUT,
        size_bytes=num_units * ALIGNMENT_BYTES,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_resident=max_resident,
        accelerator=accelerator,
        host_tier_bytes=host_tier_units * ALIGNMENT_BYTES,
        finish=finish,
        background_bytes=background_bytes,
    )


def acquire(memory: AdapterMemory, adapter: TinyAdapter) -> int:
    """Waits until the adapter can be used; returns its slot."""
    for _ in range(20):
        memory.settle_uploads()
        adapter_slot = memory.try_acquire(adapter.digest)
        if adapter_slot is not None:
            return adapter_slot
        memory.wait_for_upload()
    raise AssertionError(f"adapter {adapter.value} never arrives")


def content(memory: AdapterMemory, adapter_slot: int, num_units: int) -> list[float]:
    """The distinct values of the adapter's extent, as the kernels find it through the table."""
    start = int(memory.table.offset_a[adapter_slot, 0])
    assert int(memory.table.offset_b[adapter_slot, 0]) == start + 32
    assert int(memory.table.lora_rank[adapter_slot, 0]) == num_units
    return torch.unique(memory.table.arena[start : start + num_units * UNIT]).tolist()
