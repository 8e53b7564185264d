"""The ops in Triton, for NVIDIA GPUs; on a CPU only in Triton's interpreter, for tests."""

from collections.abc import Sequence
from operator import is_not

import torch
from torch import Tensor

from loraserve_kernels.adapter_table import AdapterTable, LoraGroup
from loraserve_kernels.composed_decoder_layer import ComposedDecoderLayer, ComposedDecoderLayers
from loraserve_kernels.decoder_layer import DecoderLayer, DecoderLayerParts, DecoderLayers
from loraserve_kernels.decoder_model import DecoderModelParts
from loraserve_kernels.four_bit_weight import FourBitLinear, FourBitWeight, dequantize_weight
from loraserve_kernels.host_sampling import ReferenceSampling
from loraserve_kernels.kv_write import check_kv_write
from loraserve_kernels.latent_ops import ReferenceLatentOps
from loraserve_kernels.linear import Linear
from loraserve_kernels.logit_edits import LogitEdits
from loraserve_kernels.lora_add import check_adapter_table, check_lora_add
from loraserve_kernels.lora_embed import check_lora_embed
from loraserve_kernels.lora_tiles import check_tiles, tiles_of
from loraserve_kernels.prepacked_linear import RowMajorLinear
from loraserve_kernels.quantization import Quantization
from loraserve_kernels.quantized_weight import QuantizedLinear, rounded_weight
from loraserve_kernels.recurrent_ops import ReferenceRecurrentOps
from loraserve_kernels.rms_norm import check_add_rms_norm, check_rms_norm
from loraserve_kernels.rotary_kv_write import check_rotary_kv_write
from loraserve_kernels.sampling import DrawParams, check_sample
from loraserve_kernels.silu_mul import check_silu_mul
from loraserve_kernels.step_batch import Segments, StepBatch
from loraserve_kernels.triton_ops.kv_write import kv_write
from loraserve_kernels.triton_ops.logit_edits import count_tokens
from loraserve_kernels.triton_ops.lora_embed import lora_embed
from loraserve_kernels.triton_ops.lora_expand import lora_expand
from loraserve_kernels.triton_ops.lora_shrink import lora_shrink
from loraserve_kernels.triton_ops.paged_attention import paged_attention
from loraserve_kernels.triton_ops.rms_norm import add_rms_norm, rms_norm
from loraserve_kernels.triton_ops.rotary_kv_write import rotary_kv_write
from loraserve_kernels.triton_ops.sampling import sample
from loraserve_kernels.triton_ops.silu_mul import silu_mul


class TritonBackend(ReferenceSampling, ReferenceRecurrentOps, ReferenceLatentOps):
    """Implements `Backend`. Every op gives the same bits in every run.

    Given work lists (`Segments.tiles`, `StepBatch.attention`), only `SamplesOnHost`'s ops read tensors on the host, and
    launches depend on shapes alone: a step can be captured in a CUDA graph and replayed with other values, such as more
    adapters or larger ranks. Values are trusted: unlike in the C functions, offsets are not checked.

    Every launch states whether multiplications and additions may be fused: Triton's default differs between versions.
    """

    name = "triton"

    def __init__(self) -> None:
        self._checked: dict[int, tuple[object, ...]] = {}
        """By a group's id: the group and the table's tensors with which it was checked."""

    def linear(
        self, weight: Tensor, bias: Tensor | None, *, keep_weight: bool, quantization: Quantization | None = None
    ) -> Linear:
        """See `Backend.linear`. `F.linear` on the weight itself, which is not copied, unless it is quantized."""
        return QuantizedLinear(weight, bias, quantization) if quantization else RowMajorLinear(weight, bias)

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

    def decoder_layer(self, parts: DecoderLayerParts) -> DecoderLayer:
        """See `Backend.decoder_layer`."""
        return ComposedDecoderLayer(parts, self)

    def decoder_layers(self, layers: Sequence[DecoderLayer]) -> DecoderLayers:
        """See `Backend.decoder_layers`. Saves one launch between two layers."""
        composed = [layer for layer in layers if isinstance(layer, ComposedDecoderLayer)]
        assert len(composed) == len(layers), "layers of another backend"
        return ComposedDecoderLayers(composed)

    def decoder_model(self, parts: DecoderModelParts) -> None:
        """See `Backend.decoder_model`."""

    def lora_add(self, y: Tensor, x: Tensor, group: LoraGroup, table: AdapterTable, segments: Segments) -> None:
        """See `Backend.lora_add`. Biases are added before the only rounding, whatever `table.num_biased` is."""
        check_lora_add(y, x, group, table, segments)
        if not segments.has_adapter or x.shape[0] == 0:
            return
        self._check_adapter_table(group, table)
        tiles = tiles_of(segments, x.shape[0])
        check_tiles(tiles, x)
        lora_expand(y, lora_shrink(x, group, table, tiles), group, table, tiles)

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
        if not segments.has_adapter or y.shape[0] == 0:
            return
        self._check_adapter_table(group, table)
        tiles = tiles_of(segments, y.shape[0])
        check_tiles(tiles, y)
        lora_embed(y, token_ids, embed_scale, group, table, tiles)

    def _check_adapter_table(self, group: LoraGroup, table: AdapterTable) -> None:
        """Check once for the same tensors: it runs four times per layer and takes 0.3 us instead of 2.8."""
        now = (
            group,
            table.arena,
            table.offset_a,
            table.offset_b,
            table.lora_rank,
            table.scaling,
            table.offset_magnitude,
        )
        checked = self._checked.get(id(group))
        if checked is None or any(map(is_not, checked, now)):
            check_adapter_table(group, table)
            self._checked[id(group)] = now

    def kv_write(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        """See `Backend.kv_write`. Rows whose slot is -1 are skipped."""
        check_kv_write(k, v, k_cache, v_cache, slot_mapping)
        kv_write(k, v, k_cache, v_cache, slot_mapping)

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
        """See `Backend.rotary_kv_write`. Rows whose slot is -1 are skipped, including their q."""
        check_rotary_kv_write(q, k, v, cos, sin, k_cache, v_cache, slot_mapping)
        rotary_kv_write(q, k, v, cos, sin, k_cache, v_cache, slot_mapping)

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
        """See `Backend.paged_attention`. Rows that belong to no sequence are left undefined."""
        return paged_attention(
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
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `Backend.add_rms_norm`."""
        check_add_rms_norm(x, residual, weight)
        return add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """See `Backend.silu_mul`."""
        check_silu_mul(gate, up)
        return silu_mul(gate, up)

    def sample(
        self, logits: Tensor, vocab_size: int, draws: DrawParams | None, edits: LogitEdits | None
    ) -> tuple[Tensor, Tensor]:
        """See `SamplesOnDevice`."""
        check_sample(logits, vocab_size, draws, edits)
        return sample(logits, vocab_size, draws, edits)

    def count_tokens(self, edits: LogitEdits, token_ids: Tensor, is_finite: Tensor) -> None:
        """See `SamplesOnDevice`."""
        count_tokens(edits, token_ids, is_finite)
