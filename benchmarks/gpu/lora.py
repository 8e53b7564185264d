"""LoRA workloads of an 8-billion-parameter Llama, created on the GPU, for the LoRA kernels' benchmarks."""

from dataclasses import dataclass

import numpy as np
import torch
from loraserve_kernels.adapter_table import AdapterTable, LoraGroup
from loraserve_kernels.lora_add import LoraInputs
from loraserve_kernels.lora_tiles import DECODE_MAX_ROWS, fill_tiles, tile_capacity
from loraserve_kernels.step_batch import Segments
from torch import Tensor

ALIGNMENT = 128
"""Matrices start at multiples of this many elements, as in the engine's arena."""

DTYPE = torch.bfloat16
LINEARS = {
    "qkv": LoraGroup(0, 0, 4096, (4096, 1024, 1024)),
    "o": LoraGroup(0, 0, 4096, (4096,)),
    "gate_up": LoraGroup(0, 0, 4096, (14336, 14336)),
    "down": LoraGroup(0, 0, 14336, (4096,)),
}
GROUPS = {**LINEARS, "embedding": LoraGroup(0, 0, 128256, (4096,))}


@dataclass(frozen=True, slots=True)
class Workload:
    """`num_rows` rows divided among `num_adapters` adapters, which take the ranks in turn."""

    linear: str
    num_rows: int
    num_adapters: int
    ranks: tuple[int, ...]
    is_skewed: bool = False
    """The first adapter gets nine rows of ten."""

    @property
    def name(self) -> str:
        ranks = "/".join(map(str, self.ranks))
        return f"{self.linear} B{self.num_rows} D{self.num_adapters} r{ranks}{' skewed' if self.is_skewed else ''}"

    @property
    def group(self) -> LoraGroup:
        return GROUPS[self.linear]

    @property
    def features(self) -> tuple[int, int]:
        """(inputs, outputs of all members together)."""
        return self.group.in_features, sum(self.group.out_features)

    @property
    def rank_of_adapters(self) -> list[int]:
        return [self.ranks[i % len(self.ranks)] for i in range(self.num_adapters)]

    @property
    def segment_rows(self) -> list[int]:
        """Rows of each adapter; at least one."""
        first = self.num_rows * 9 // 10 if self.is_skewed else 0
        shares = [len(part) for part in np.array_split(np.arange(self.num_rows - first), self.num_adapters)]
        return [shares[0] + first, *shares[1:]]

    @property
    def num_tiles(self) -> int:
        """Length of the engine's work list: decode graphs allow one adapter per row; larger batches run eagerly."""
        return tile_capacity(self.num_rows, self.num_rows if self.num_rows <= DECODE_MAX_ROWS else self.num_adapters)

    def hidden_elements(self) -> int:
        num_members = len(self.group.out_features)
        pairs = zip(self.segment_rows, self.rank_of_adapters, strict=True)
        return sum(rows * lora_rank for rows, lora_rank in pairs) * num_members

    def shrink_bytes(self) -> int:
        """Each adapter's A, x, and hidden once."""
        a = sum(self.rank_of_adapters) * len(self.group.out_features) * self.group.in_features
        return 2 * a + 2 * self.num_rows * self.group.in_features + 4 * self.hidden_elements()

    def expand_bytes(self) -> int:
        """Each adapter's B, hidden once, y read and written."""
        columns = sum(self.group.out_features)
        return 2 * sum(self.rank_of_adapters) * columns + 4 * self.hidden_elements() + 4 * self.num_rows * columns

    def shrink_flops(self) -> int:
        return 2 * self.hidden_elements() * self.group.in_features

    def expand_flops(self) -> int:
        return 2 * self.hidden_elements() * sum(self.group.out_features) // len(self.group.out_features)

    def weight_bytes(self) -> int:
        return 2 * self.group.in_features * sum(self.group.out_features)

    def make(self, seed: int) -> LoraInputs:
        """Arguments of `lora_add`, with the same work list that a runner makes."""
        torch.cuda.manual_seed(seed)
        group, rows = self.group, self.segment_rows
        start = np.cumsum([0, *rows]).astype(np.int32)
        slots = np.arange(self.num_adapters, dtype=np.int32)
        tiles = np.empty((self.num_tiles, 6), np.int32)
        fill_tiles(tiles, start, slots, self.num_rows)
        segments = Segments(*(_on_gpu(array) for array in (start, slots)), has_adapter=True, tiles=_on_gpu(tiles))
        x = torch.randn(self.num_rows, group.in_features, device="cuda", dtype=DTYPE)
        y = torch.randn(self.num_rows, sum(group.out_features), device="cuda", dtype=DTYPE)
        return LoraInputs(y, x, group, self._table(), segments)

    def _table(self) -> AdapterTable:
        group, num_members = self.group, len(self.group.out_features)
        offset_a = np.zeros((self.num_adapters, 1), np.int64)
        offset_b = np.zeros((self.num_adapters, num_members), np.int64)
        end = 0
        for slot, lora_rank in enumerate(self.rank_of_adapters):
            offset_a[slot] = end
            end += _aligned(lora_rank * num_members * group.in_features)
            for member, columns in enumerate(group.out_features):
                offset_b[slot, member] = end
                end += _aligned(lora_rank * columns)
        lora_rank = np.repeat(np.array(self.rank_of_adapters, np.int32)[:, None], num_members, axis=1)
        return AdapterTable(
            arena=torch.randn(end, device="cuda", dtype=DTYPE) * 0.02,
            offset_a=_on_gpu(offset_a),
            offset_b=_on_gpu(offset_b),
            lora_rank=_on_gpu(lora_rank),
            scaling=torch.ones(offset_b.shape, device="cuda"),
            offset_bias=torch.full(offset_b.shape, -1, dtype=torch.int64, device="cuda"),
            offset_magnitude=torch.full(offset_b.shape, -1, dtype=torch.int64, device="cuda"),
            offset_alignment=ALIGNMENT,
        )


HEADLINES = (
    Workload("qkv", 1, 1, (16,)),
    Workload("gate_up", 32, 32, (16,)),
    Workload("down", 256, 128, (64,)),
    Workload("gate_up", 8192, 8, (16,)),
    Workload("gate_up", 64, 1, (16,)),
    Workload("gate_up", 64, 64, (8, 16, 32, 64)),
    Workload("gate_up", 64, 7, (16,), is_skewed=True),
    Workload("qkv", 64, 64, (16,)),
    Workload("qkv", 512, 16, (16,), is_skewed=True),
    Workload("gate_up", 512, 8, (16,)),
    Workload("gate_up", 512, 512, (16,)),
)


def workloads() -> list[Workload]:
    """Most informative first, in case time is short; then every linear with few and with many adapters."""
    found = [*HEADLINES]
    for linear in LINEARS:
        found.append(Workload(linear, 2048, 4, (16,)))
        for num_rows in (1, 4, 16, 64, 256, 512):
            found += [Workload(linear, num_rows, num, (16,)) for num in (1, min(8, num_rows), min(num_rows, 128))]
    for ranks in ((8,), (64,)):
        found += [Workload("gate_up", 64, 64, ranks), Workload("gate_up", 8192, 8, ranks)]
    return list(dict.fromkeys(found))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _on_gpu(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array).cuda()
