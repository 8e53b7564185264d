"""State that every attention layer and linear group of the model reads during a forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from loraserve_kernels.adapter_table import AdapterTable, LoraGroup
from loraserve_kernels.backend import Backend
from loraserve_kernels.step_batch import Run, StepBatch
from torch import Tensor


class Arrivals(Protocol):
    """The adapters of a batch that are still being copied to the device."""

    def before_group(self, group_index: int) -> None:
        """Work queued from now on runs after the matrices of this linear group, and of earlier ones, have arrived."""
        ...


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The state that one call of a function needs, for each sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(slots=True)
class ForwardContext:
    """One per model. Swapped modules hold it from construction; `batch` and `arrivals` are set for each forward."""

    backend: Backend
    batch: StepBatch | None = None
    adapter_table: AdapterTable | None = None
    """None = no adapter can be loaded; LoRA costs nothing."""
    arrivals: Arrivals | None = None
    """None = every adapter of the batch has arrived."""
    k_caches: list[Tensor] = field(default_factory=list)
    """Per attention layer: [num_blocks, num_kv_heads, block_size, head_dim]."""
    v_caches: list[Tensor] = field(default_factory=list)
    state_specs: list[StateSpec] = field(default_factory=list)
    """All states of recurrent layers, in call order."""
    states: list[Tensor] = field(default_factory=list)
    """Per state: [num_slots, *shape]."""

    def add_adapters(self, y: Tensor, x: Tensor, group: LoraGroup, *, sampled_rows: bool = False) -> None:
        """Add to the base model's y = linear(x), in place. x: [T, in_features] or, with sampled_rows, those rows.

        Rows of adapters that have an own table instead of the linear's weight become x times that.
        """
        if self.adapter_table is None or x.shape[0] == 0:
            return
        batch = self.current_batch()
        segments = batch.sampled_segments if sampled_rows else batch.segments
        if segments.has_adapter:
            self.await_adapters(group)
            self.backend.lora_add(y, x, group, self.adapter_table, segments)
            self._multiply_own_tables(y, x, group, segments.own_table_runs)

    def look_up_own_tables(self, y: Tensor, token_ids: Tensor, embed_scale: float, group: LoraGroup) -> None:
        """Replace rows of y, [T, hidden_size], by those of their adapter's own embedding, if it has one."""
        for run in self.current_batch().segments.own_table_runs:
            own = self._own_table(run.adapter_slot, group.member_start)
            if own is not None:
                rows = slice(run.first_row, run.end_row)
                # Unlike indexing, this does not wake OpenMP's threads, which then spin on CPUs that the layers need: a
                # step of 16 sequences of a 100 M model took 7.6 instead of 10.2 ms (two Xeon cores).
                torch.index_select(own, 0, token_ids[rows], out=y[rows])
                if embed_scale != 1.0:
                    y[rows].mul_(embed_scale)

    def _multiply_own_tables(self, y: Tensor, x: Tensor, group: LoraGroup, runs: Sequence[Run]) -> None:
        """Replace rows of y by x times their adapter's own table, if it has one for a member of the group."""
        for run in runs:
            rows, end = slice(run.first_row, run.end_row), 0
            for member, num_columns in enumerate(group.out_features, group.member_start):
                start, end = end, end + num_columns
                own = self._own_table(run.adapter_slot, member)
                if own is not None:
                    self.backend.linear_into(y[rows, start:end], x[rows], own)

    def _own_table(self, adapter_slot: int, member: int) -> Tensor | None:
        assert self.adapter_table is not None
        return self.adapter_table.own_tables[adapter_slot].get(member)

    def await_adapters(self, group: LoraGroup) -> None:
        """Work queued from now on runs after the matrices of this group have arrived."""
        if self.arrivals is not None:
            self.arrivals.before_group(group.group_index)

    def current_batch(self) -> StepBatch:
        assert self.batch is not None, "forward without a batch"
        return self.batch
