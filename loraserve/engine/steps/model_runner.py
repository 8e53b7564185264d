"""Runs steps on the model; owns the KV caches and the model's context."""

from collections.abc import Callable, Sequence

import torch
from loraserve_kernels.adapter_table import AdapterTable
from loraserve_kernels.decoder_model import ModelOutput
from loraserve_kernels.kv_float8 import indexable
from loraserve_kernels.step_batch import StepBatch
from torch import Tensor

from loraserve.engine.adapters.arrival import StepArrivals
from loraserve.engine.device.accelerator import upload_ids
from loraserve.engine.pages_ahead import PagesAhead
from loraserve.engine.steps.graphs import GraphSize, StepGraphs
from loraserve.models.causal_model import CausalModel


class ModelRunner:
    """The KV caches are allocated once and touched only as blocks are used, or shortly before by `touch_ahead`."""

    def __init__(
        self,
        model: CausalModel,
        num_blocks: int,
        block_size: int,
        table: AdapterTable | None,
        device: torch.device,
        kv_dtype: torch.dtype,
        num_state_slots: int = 0,
    ) -> None:
        """num_state_slots: of recurrent states, if the model has any."""

        def cache(num_kv_heads: int, head_dim: int) -> Tensor:
            return torch.empty((num_blocks, num_kv_heads, block_size, head_dim), dtype=kv_dtype, device=device)

        self._model = model
        self._has_adapters = table is not None
        self._graphs: StepGraphs | None = None
        k_caches = [cache(spec.num_kv_heads, spec.head_dim) for spec in model.kv_specs]
        specs = zip(model.kv_specs, k_caches, strict=True)
        v_caches = [k_cache if spec.num_caches == 1 else torch.empty_like(k_cache) for spec, k_cache in specs]
        once = {id(cache): cache for cache in (*k_caches, *v_caches)}
        self._caches = [indexable(cache) for cache in once.values()]
        self._pages = PagesAhead(self._caches)
        self._states = [
            torch.empty((num_state_slots, *spec.shape), dtype=spec.dtype, device=device) for spec in model.state_specs
        ]
        self._state_pages = PagesAhead(self._states if num_state_slots else [])
        model.bind(k_caches, v_caches, table, self._states)

    def forward(self, batch: StepBatch, arrivals: StepArrivals | None = None) -> ModelOutput:
        """The output is valid until the next forward.

        arrivals: of the batch's adapters; each layer runs after its part of them has arrived, a graph after all have.
        """
        if self._graphs is not None:
            logits = self._graphs.try_replay(batch, arrivals)
            if logits is not None:
                return ModelOutput(logits)
        return self._model.forward(batch, arrivals)

    def capture(
        self,
        graphs: StepGraphs,
        graph_batch: Callable[[GraphSize, bool], StepBatch],
        progress: Callable[[int, int], None],
    ) -> None:
        """Capture graphs, which steps of their sizes replay from now on; see `StepGraphs.capture`."""
        graphs.capture(lambda batch: self._model.forward(batch).logits, graph_batch, self._has_adapters, progress)
        self._graphs = graphs

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy (source, destination) pairs in every layer, as if one after another. Waits for no device."""
        origins: dict[int, int] = {}
        for source, destination in copies:
            origins[destination] = origins.get(source, source)
        with torch.inference_mode():
            if len(origins) == 1:
                ((destination, source),) = origins.items()
                for cache in self._caches:
                    cache[destination].copy_(cache[source])
            elif origins:
                device = self._caches[0].device
                sources, destinations = upload_ids(origins.values(), device), upload_ids(origins, device)
                for cache in self._caches:  # two launches each, however many blocks
                    cache.index_copy_(0, destinations, cache.index_select(0, sources))

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy recurrent states from one slot to another, one (source, destination) after another."""
        with torch.inference_mode():
            for source, destination in copies:
                for state in self._states:
                    state[destination].copy_(state[source])

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        """Wipe blocks that may hold non-finite values."""
        with torch.inference_mode():
            for cache in self._caches:
                cache[list(blocks)] = 0

    def touch_ahead(self, num_used_blocks: int, num_used_states: int) -> bool:
        """Touch some memory after the first `num_used_blocks` blocks, or states, in idle time; False if none is left to
        touch now."""
        return self._pages.touch_next(num_used_blocks) or self._state_pages.touch_next(num_used_states)
