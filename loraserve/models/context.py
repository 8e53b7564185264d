"""What every attention layer and linear group of the model reads during a forward pass."""

from dataclasses import dataclass, field

from loraserve_kernels.adapter_table import AdapterTable
from loraserve_kernels.backend import Backend
from loraserve_kernels.step_batch import StepBatch
from torch import Tensor


@dataclass(slots=True)
class ForwardContext:
    """One per model. Swapped modules hold it from construction; the runner sets `batch` before each forward."""

    backend: Backend
    batch: StepBatch | None = None
    adapter_table: AdapterTable | None = None
    """None = no adapter can be loaded; LoRA costs nothing."""
    k_caches: list[Tensor] = field(default_factory=list)
    """Per attention layer: [num_blocks, num_kv_heads, block_size, head_dim]."""
    v_caches: list[Tensor] = field(default_factory=list)

    def current_batch(self) -> StepBatch:
        assert self.batch is not None, "forward without a batch"
        return self.batch
