"""State that every attention layer and linear group of the model reads during a forward pass."""

from dataclasses import dataclass, field
from typing import Protocol

from loraserve_kernels.adapter_table import AdapterTable, LoraGroup
from loraserve_kernels.backend import Backend
from loraserve_kernels.step_batch import StepBatch
from torch import Tensor


class Arrivals(Protocol):
    """The adapters of a batch that are still being copied to the device."""

    def before_group(self, group_index: int) -> None:
        """Work queued from now on runs after the matrices of this linear group, and of earlier ones, have arrived."""
        ...


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

    def add_adapters(self, y: Tensor, x: Tensor, group: LoraGroup, *, sampled_rows: bool = False) -> None:
        """Add to the base model's y = linear(x), in place. x: [T, in_features] or, with sampled_rows, those rows."""
        if self.adapter_table is None or x.shape[0] == 0:
            return
        batch = self.current_batch()
        segments = batch.sampled_segments if sampled_rows else batch.segments
        if segments.has_adapter:
            self.await_adapters(group)
            self.backend.lora_add(y, x, group, self.adapter_table, segments)

    def await_adapters(self, group: LoraGroup) -> None:
        """Work queued from now on runs after the matrices of this group have arrived."""
        if self.arrivals is not None:
            self.arrivals.before_group(group.group_index)

    def current_batch(self) -> StepBatch:
        assert self.batch is not None, "forward without a batch"
        return self.batch
