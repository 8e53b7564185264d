"""The interface that every backend implements: reference (plain torch), CPU (C) and GPU (Triton)."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from loraserve_kernels.adapter_table import AdapterTable, LoraGroup
from loraserve_kernels.decoder_layer import DecoderLayer, DecoderLayerParts, DecoderLayers
from loraserve_kernels.decoder_model import DecoderModel, DecoderModelParts
from loraserve_kernels.four_bit_weight import FourBitWeight
from loraserve_kernels.host_sampling import SamplesOnHost
from loraserve_kernels.latent_ops import LatentOps
from loraserve_kernels.linear import Linear
from loraserve_kernels.quantization import Quantization
from loraserve_kernels.recurrent_ops import RecurrentOps
from loraserve_kernels.step_batch import Segments, StepBatch


class KernelTooLargeError(Exception):
    """The GPU lacks the resources that a kernel needs for the given shapes; the message says which."""


class Backend(SamplesOnHost, RecurrentOps, LatentOps, Protocol):
    """Ops over packed rows. Before any launch they check shapes, dtypes and devices and raise `ValueError`."""

    name: str

    def linear(
        self, weight: Tensor, bias: Tensor | None, *, keep_weight: bool, quantization: Quantization | None = None
    ) -> Linear:
        """A linear layer of weight: [out_features, in_features].

        keep_weight: the weight stays in use elsewhere (an embedding tied to `lm_head`), so no second copy is made.
        quantization: compute with the `rounded_weight`; not together with keep_weight.
        """
        ...

    def linear_into(self, y: Tensor, x: Tensor, weight: Tensor) -> None:
        """y = x Wᵀ for a weight that is not prepared in any way.

        weight: [N, K], dense; x: [T, K], y: [T, N], rows may be strided, the last dimension is dense.
        """
        ...

    def rounded_weight(self, weight: Tensor, quantization: Quantization, out: Tensor | None = None) -> Tensor:
        """The weight that a quantized `linear` computes with; see `quantized_weight.rounded_weight`."""
        ...

    def four_bit_linear(self, weight: FourBitWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        """A linear layer of a weight that stays in four bits. bias: [N]; dtype: of the bias and of rows."""
        ...

    def dequantize_weight(self, weight: FourBitWeight, out: Tensor) -> Tensor:
        """The weight that `four_bit_linear` computes with; see `four_bit_weight.dequantize_weight`."""
        ...

    def packs(self, dtype: torch.dtype) -> bool:
        """Whether `linear`, without keep_weight, stores a weight of the dtype in the backend's own layout, from which
        reading rows is fast enough for an embedding table."""
        ...

    def num_free_rows(self, dtype: torch.dtype, quantization: Quantization | None = None) -> int:
        """Rows that linears in the dtype compute in about the time it takes to read their weights; 1 = unknown.

        Above 1, a row's result does not depend on the number of rows.
        """
        ...

    def decoder_layer(self, parts: DecoderLayerParts) -> DecoderLayer | None:
        """The layer as one op; None if the backend has only the separate ops. The linears are this backend's."""
        ...

    def decoder_layers(self, layers: Sequence[DecoderLayer]) -> DecoderLayers | None:
        """Layers that `decoder_layer` returned, as one op; None if that is no faster."""
        ...

    def decoder_model(self, parts: DecoderModelParts) -> DecoderModel | None:
        """Everything from token ids to logits and the greedy choice as one op; None if that is no faster."""
        ...

    def lora_add(self, y: Tensor, x: Tensor, group: LoraGroup, table: AdapterTable, segments: Segments) -> None:
        """Add scaling * ((x Aᵀ) B + bias) of each row's adapter to y, in place, for every member of the group.

        With DoRA (arXiv 2402.09353), if a member has an `offset_magnitude`, y becomes
        factor * (y + scaling * (x Aᵀ) B) + shift, with a factor and a shift for each column; such a member has no bias.

        x: [T, in_features], y: [T, sum(out_features)], rows may be strided, the last dimension is dense.
        Computed in float32 and rounded once to y's dtype, but a bias may be added and rounded separately. Rows of base
        segments and columns of absent members are left untouched, bit for bit.
        """
        ...

    def lora_embed(
        self,
        y: Tensor,
        token_ids: Tensor,
        embed_scale: float,
        group: LoraGroup,
        table: AdapterTable,
        segments: Segments,
    ) -> None:
        """Add embed_scale * scaling * A[:, token] B of each row's adapter to y, in place.

        token_ids: int64 [T], below the group's in_features; y: [T, out_features] of its only member; embed_scale: the
        factor by which the base model multiplies rows of its table. Otherwise as `lora_add`, without biases.
        """
        ...

    def kv_write(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        """Store k, v: [T, num_kv_heads, head_dim] at slot_mapping: int64 [T].

        Caches: [num_blocks, num_kv_heads, block_size, head_dim], in the rows' dtype or in `KV_FLOAT8`, to which values
        are rounded as by `to_kv_float8`.
        """
        ...

    def rotary_kv_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Rotate q: [T, num_heads, head_dim] in place; store rotated k, and v, like `kv_write`; k and v do not change.

        cos, sin: [T, rotary_dim], for the first rotary_dim features of each head: feature i is rotated with feature
        i + rotary_dim / 2. Computed in float32, and rounded once to the dtype of q or of the caches.
        """
        ...

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: StepBatch,
        *,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of q: [T, num_heads, head_dim] over the paged context; returns the same shape.

        A query at position p sees keys k <= p, and with a window only k > p - sliding_window. softcap: scores become
        softcap * tanh(score / softcap). sinks: [num_heads] logits that join the softmax without a value.
        Query head h reads key head h // (num_heads // num_kv_heads). The caches are in q's dtype, or in `KV_FLOAT8` and
        widened to it. Raises `KernelTooLargeError` if a GPU has too little shared memory for head_dim in q's dtype.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) * weight over the last dimension, computed in float32, returned in x's dtype."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(x + residual in their dtype, its `rms_norm`), both newly allocated; bit for bit as two operations."""
        ...

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, both [T, N], rows may be strided."""
        ...
