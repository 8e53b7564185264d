"""Every op in plain torch with float32 arithmetic, on any device and in any floating dtype."""

from collections.abc import Sequence

import torch
from torch import Tensor

from loraserve_kernels.adapter_table import AdapterTable, LoraGroup
from loraserve_kernels.decoder_layer import DecoderLayer, DecoderLayerParts
from loraserve_kernels.decoder_model import DecoderModelParts
from loraserve_kernels.four_bit_weight import FourBitLinear, FourBitWeight, dequantize_weight
from loraserve_kernels.host_sampling import ReferenceSampling
from loraserve_kernels.kv_write import check_kv_write, kv_write_reference
from loraserve_kernels.latent_ops import ReferenceLatentOps
from loraserve_kernels.linear import Linear
from loraserve_kernels.lora_add import check_lora_add, lora_add_reference
from loraserve_kernels.lora_bias import lora_bias_add
from loraserve_kernels.lora_embed import check_lora_embed, lora_embed_reference
from loraserve_kernels.paged_attention import check_paged_attention, paged_attention_reference
from loraserve_kernels.prepacked_linear import PrepackedLinear, RowMajorLinear
from loraserve_kernels.quantization import Quantization
from loraserve_kernels.quantized_weight import QuantizedLinear, rounded_weight
from loraserve_kernels.recurrent_ops import ReferenceRecurrentOps
from loraserve_kernels.rms_norm import (
    add_rms_norm_reference,
    check_add_rms_norm,
    check_rms_norm,
    rms_norm_reference,
)
from loraserve_kernels.rotary_kv_write import check_rotary_kv_write, rotary_kv_write_reference
from loraserve_kernels.silu_mul import check_silu_mul, silu_mul_reference
from loraserve_kernels.step_batch import Segments, StepBatch


class ReferenceBackend(ReferenceSampling, ReferenceRecurrentOps, ReferenceLatentOps):
    """Implements `Backend`. The other backends are tested against it, and it serves if they cannot run."""

    name = "reference"

    def linear(
        self, weight: Tensor, bias: Tensor | None, *, keep_weight: bool, quantization: Quantization | None = None
    ) -> Linear:
        """See `Backend.linear`."""
        assert not (keep_weight and quantization), "keep_weight excludes quantization"
        if keep_weight:
            return RowMajorLinear(weight, bias)
        return QuantizedLinear(weight, bias, quantization) if quantization else PrepackedLinear(weight, bias)

    def linear_into(self, y: Tensor, x: Tensor, weight: Tensor) -> None:
        """See `Backend.linear_into`."""
        RowMajorLinear(weight).multiply_into(y, x)

    def rounded_weight(self, weight: Tensor, quantization: Quantization, out: Tensor | None = None) -> Tensor:
        """See `Backend.rounded_weight`."""
        return rounded_weight(weight, quantization, out)

    def four_bit_linear(self, weight: FourBitWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        """See `Backend.four_bit_linear`."""
        return FourBitLinear(weight, bias, dtype)

    def dequantize_weight(self, weight: FourBitWeight, out: Tensor) -> Tensor:
        """See `Backend.dequantize_weight`."""
        return dequantize_weight(weight, out)

    def packs(self, dtype: torch.dtype) -> bool:
        """See `Backend.packs`."""
        return False

    def num_free_rows(self, dtype: torch.dtype, quantization: Quantization | None = None) -> int:
        """See `Backend.num_free_rows`."""
        return 1

    def decoder_layer(self, parts: DecoderLayerParts) -> None:
        """None: the separate ops are the reference."""

    def decoder_layers(self, layers: Sequence[DecoderLayer]) -> None:
        """See `Backend.decoder_layers`."""

    def decoder_model(self, parts: DecoderModelParts) -> None:
        """See `Backend.decoder_model`."""

    def lora_add(self, y: Tensor, x: Tensor, group: LoraGroup, table: AdapterTable, segments: Segments) -> None:
        """See `Backend.lora_add`."""
        check_lora_add(y, x, group, table, segments)
        if segments.has_adapter:
            lora_add_reference(y, x, group, table, segments)
            if table.num_biased:
                lora_bias_add(y, group, table, segments)

    def lora_embed(
        self,
        y: Tensor,
        token_ids: Tensor,
        embed_scale: float,
        group: LoraGroup,
        table: AdapterTable,
        segments: Segments,
    ) -> None:
        """See `Backend.lora_embed`."""
        check_lora_embed(y, token_ids, group, table)
        if segments.has_adapter:
            lora_embed_reference(y, token_ids, embed_scale, group, table, segments)

    def kv_write(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        """See `Backend.kv_write`."""
        check_kv_write(k, v, k_cache, v_cache, slot_mapping)
        kv_write_reference(k, v, k_cache, v_cache, slot_mapping)

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
        """See `Backend.rotary_kv_write`."""
        check_rotary_kv_write(q, k, v, cos, sin, k_cache, v_cache, slot_mapping)
        rotary_kv_write_reference(q, k, v, cos, sin, k_cache, v_cache, slot_mapping)

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
        """See `Backend.paged_attention`."""
        check_paged_attention(q, k_cache, v_cache, batch, sliding_window, softcap, sinks)
        return paged_attention_reference(
            q,
            k_cache,
            v_cache,
            batch,
            scaling=scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=sinks,
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Backend.rms_norm`."""
        check_rms_norm(x, weight)
        return rms_norm_reference(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `Backend.add_rms_norm`."""
        check_add_rms_norm(x, residual, weight)
        return add_rms_norm_reference(x, residual, weight, eps)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """See `Backend.silu_mul`."""
        check_silu_mul(gate, up)
        return silu_mul_reference(gate, up)
