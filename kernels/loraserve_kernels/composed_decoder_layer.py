"""Decoder layers composed of a backend's separate ops."""

from collections.abc import Sequence

from torch import Tensor

from loraserve_kernels.adapter_table import AdapterTable
from loraserve_kernels.backend import Backend
from loraserve_kernels.decoder_layer import DecoderLayerParts, Norm
from loraserve_kernels.linear import Linear
from loraserve_kernels.step_batch import StepBatch


class ComposedDecoderLayer:
    """The layer as a backend's separate ops compute it; a fused layer must agree with it."""

    def __init__(self, parts: DecoderLayerParts, backend: Backend) -> None:
        self._parts = parts
        self._backend = backend

    def __call__(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: StepBatch,
        table: AdapterTable | None,
    ) -> Tensor:
        """See `DecoderLayer`."""
        x, added = self.compute(x, None, rotary, k_cache, v_cache, batch, table)
        return x + added

    def compute(
        self,
        x: Tensor,
        added: Tensor | None,
        rotary: tuple[Tensor, Tensor] | None,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: StepBatch,
        table: AdapterTable | None,
    ) -> tuple[Tensor, Tensor]:
        """The layer's output for the input x + added (None = x alone), as two terms that add up to it bit for bit.

        x, added and both terms: [T, hidden_size].
        """
        parts, backend = self._parts, self._backend

        def linear(index: int, layer: Linear, rows: Tensor) -> Tensor:
            y = layer(rows)
            if table is not None:
                backend.lora_add(y, rows, parts.lora_groups[index], table, batch.segments)
            return y

        def norm(rows: Tensor, of: Norm) -> Tensor:
            return backend.rms_norm(rows, of.weight, of.eps)

        if added is None:
            normed = norm(x, parts.input_norm)
        else:
            x, normed = backend.add_rms_norm(x, added, parts.input_norm.weight, parts.input_norm.eps)
        heads = [parts.num_heads, parts.num_kv_heads, parts.num_kv_heads]
        qkv = linear(0, parts.qkv, normed).unflatten(-1, (sum(heads), parts.head_dim))
        q, k, v = qkv.split(heads, dim=1)
        q = q if parts.q_norm is None else norm(q, parts.q_norm)
        k = k if parts.k_norm is None else norm(k, parts.k_norm)
        if rotary is None:
            backend.kv_write(k, v, k_cache, v_cache, batch.slot_mapping)
        else:
            cos, sin = (factor.flatten(0, -2) for factor in rotary)
            backend.rotary_kv_write(q, k, v, cos, sin, k_cache, v_cache, batch.slot_mapping)
        attended = backend.paged_attention(
            q,
            k_cache,
            v_cache,
            batch,
            scaling=parts.scaling,
            sliding_window=parts.sliding_window,
            softcap=parts.softcap,
        )
        attended = linear(1, parts.output, attended.flatten(1))
        x, normed = backend.add_rms_norm(x, attended, parts.mlp_norm.weight, parts.mlp_norm.eps)
        gate, up = linear(2, parts.gate_up, normed).split(parts.intermediate_size, dim=1)
        return x, linear(3, parts.down, backend.silu_mul(gate, up))


class ComposedDecoderLayers:
    """One or more layers of one backend; each layer's last addition is one op with the next layer's first norm."""

    def __init__(self, layers: Sequence[ComposedDecoderLayer]) -> None:
        self._layers = list(layers)

    def __call__(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        k_caches: Sequence[Tensor],
        v_caches: Sequence[Tensor],
        batch: StepBatch,
        table: AdapterTable | None,
    ) -> Tensor:
        """See `DecoderLayers`."""
        added = None
        for layer, k_cache, v_cache in zip(self._layers, k_caches, v_caches, strict=True):
            x, added = layer.compute(x, added, rotary, k_cache, v_cache, batch, table)
        assert added is not None
        return x + added
