"""Runs steps on the model: owns the KV caches and the model's context."""

from collections.abc import Callable, Sequence

import torch
from loraserve_kernels.adapter_table import AdapterTable
from loraserve_kernels.step_batch import StepBatch
from torch import Tensor

from loraserve.engine.decode_graphs import DecodeGraphs
from loraserve.models.causal_model import CausalModel


class ModelRunner:
    """The KV caches are allocated once and touched only as blocks are used."""

    def __init__(
        self, model: CausalModel, num_blocks: int, block_size: int, table: AdapterTable | None, device: torch.device
    ) -> None:
        def cache(num_kv_heads: int, head_dim: int) -> Tensor:
            return torch.empty((num_blocks, num_kv_heads, block_size, head_dim), dtype=model.dtype, device=device)

        self._model = model
        self._has_adapters = table is not None
        self._graphs: DecodeGraphs | None = None
        self._k_caches = [cache(spec.num_kv_heads, spec.head_dim) for spec in model.kv_specs]
        self._v_caches = [cache(spec.num_kv_heads, spec.head_dim) for spec in model.kv_specs]
        model.bind(self._k_caches, self._v_caches, table)

    def forward(self, batch: StepBatch) -> Tensor:
        """Logits [R, padded vocab] of the sampled rows, valid until the next forward."""
        if self._graphs is not None:
            logits = self._graphs.try_replay(batch)
            if logits is not None:
                return logits
        return self._run(batch)

    def capture(
        self,
        graphs: DecodeGraphs,
        graph_batch: Callable[[int, bool], StepBatch],
        progress: Callable[[int, int], None],
    ) -> None:
        """From now on decode steps are replays of these graphs; see `DecodeGraphs.capture`."""
        graphs.capture(self._run, graph_batch, self._has_adapters, progress)
        self._graphs = graphs

    def _run(self, batch: StepBatch) -> Tensor:
        with torch.inference_mode():
            return self._model.forward(batch)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """(source, destination) pairs, in order, in every layer."""
        with torch.inference_mode():
            for source, destination in copies:
                for cache in (*self._k_caches, *self._v_caches):
                    cache[destination].copy_(cache[source])

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        """Wipe blocks that may hold non-finite values."""
        with torch.inference_mode():
            for cache in (*self._k_caches, *self._v_caches):
                cache[list(blocks)] = 0
