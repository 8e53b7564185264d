"""The ops in C on CPU, in float32 and bfloat16; the reference backend serves other dtypes (float16, float8 caches)."""

from collections.abc import Sequence
from ctypes import addressof, c_double, c_int64

import torch
from torch import Tensor

from loraserve_kernels.adapter_table import AdapterTable, LoraGroup
from loraserve_kernels.argmax import BestTokens, best_tokens, check_argmax
from loraserve_kernels.checks import require_cpu
from loraserve_kernels.composed_decoder_layer import ComposedDecoderLayer
from loraserve_kernels.cpu_calls import DTYPE_CODES, QUANTIZED_FORMATS, AttentionStruct, RotaryStruct
from loraserve_kernels.cpu_decoder_layer import CpuDecoderLayer, CpuDecoderLayers, StepAddresses
from loraserve_kernels.cpu_decoder_model import CpuDecoderModel
from loraserve_kernels.cpu_latent_ops import CpuLatentOps
from loraserve_kernels.cpu_library import CpuLibrary
from loraserve_kernels.cpu_recurrent_ops import CpuRecurrentOps
from loraserve_kernels.decoder_layer import DecoderLayer, DecoderLayerParts, DecoderLayers
from loraserve_kernels.decoder_model import DecoderModel, DecoderModelParts
from loraserve_kernels.draw import Draw, check_draws, pack_draws
from loraserve_kernels.edited_draw import EditedDraw, check_edited_draws, pack_edited_draws
from loraserve_kernels.four_bit_weight import FourBitLinear, FourBitWeight, check_dequantize_weight, dequantize_weight
from loraserve_kernels.kv_write import check_kv_write
from loraserve_kernels.linear import Linear
from loraserve_kernels.lora_add import check_lora_add
from loraserve_kernels.lora_bias import lora_bias_add
from loraserve_kernels.lora_embed import check_lora_embed
from loraserve_kernels.packed_linear import PackedLinear, packed_bytes
from loraserve_kernels.paged_attention import check_paged_attention
from loraserve_kernels.prepacked_linear import PrepackedLinear, RowMajorLinear
from loraserve_kernels.quantization import STORED, Quantization
from loraserve_kernels.quantized_weight import QuantizedLinear, rounded_like, rounded_weight
from loraserve_kernels.reference_backend import ReferenceBackend
from loraserve_kernels.rms_norm import check_add_rms_norm, check_rms_norm
from loraserve_kernels.rotary_kv_write import check_rotary_kv_write
from loraserve_kernels.score import Score, ScoreQuery, check_score_queries, pack_score_queries, read_scores
from loraserve_kernels.silu_mul import check_silu_mul
from loraserve_kernels.step_batch import Segments, StepBatch


class CpuBackend(CpuRecurrentOps, CpuLatentOps):
    """Implements `Backend` with the C functions of a `CpuLibrary`, on `torch.get_num_threads()` threads.

    A row's result of `lora_add`, `paged_attention`, `rms_norm`, `silu_mul`, the recurrent ops and those of latents is
    the same, bit for bit, whatever other rows are in the batch and however a prompt is chunked.
    """

    name = "cpu"

    def __init__(self, library: CpuLibrary) -> None:
        super().__init__(library)
        self._reference = ReferenceBackend()
        self._step = StepAddresses()

    def linear(
        self, weight: Tensor, bias: Tensor | None, *, keep_weight: bool, quantization: Quantization | None = None
    ) -> Linear:
        """See `Backend.linear`."""
        assert not (keep_weight and quantization), "keep_weight excludes quantization"
        if keep_weight:
            return RowMajorLinear(weight, bias, self.library)
        if packed_bytes(weight, self.library) > 0:
            return PackedLinear(weight, bias, self.library, quantization)
        return QuantizedLinear(weight, bias, quantization) if quantization else PrepackedLinear(weight, bias)

    def linear_into(self, y: Tensor, x: Tensor, weight: Tensor) -> None:
        """See `Backend.linear_into`."""
        RowMajorLinear(weight, None, self.library).multiply_into(y, x)

    def rounded_weight(self, weight: Tensor, quantization: Quantization, out: Tensor | None = None) -> Tensor:
        """See `Backend.rounded_weight`. On two EPYC Zen 4 cores 8 billion weights a second to eight bits (3 into
        newly allocated memory, 0.6 in torch) and 1.5 to four bits."""
        code = DTYPE_CODES.get(weight.dtype)
        if code is None:
            return rounded_weight(weight, quantization, out)
        dense, depth = weight.detach().contiguous(), weight.shape[-1]
        rounded = rounded_like(weight, out)
        sizes = dense.numel() // max(depth, 1), depth
        weight_format = QUANTIZED_FORMATS[quantization]
        self._c.round_weight(rounded.data_ptr(), dense.data_ptr(), *sizes, weight_format, code, torch.get_num_threads())
        return rounded

    def four_bit_linear(self, weight: FourBitWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        """See `Backend.four_bit_linear`."""
        if self.packs(dtype):
            return PackedLinear(weight, bias, self.library, dtype=dtype)
        return FourBitLinear(weight, bias, dtype)

    def dequantize_weight(self, weight: FourBitWeight, out: Tensor) -> Tensor:
        """See `Backend.dequantize_weight`."""
        code = DTYPE_CODES.get(out.dtype)
        if code is None:
            return dequantize_weight(weight, out)
        check_dequantize_weight(weight, out)
        zeros = None if weight.zeros is None else weight.zeros.data_ptr()
        order = None if weight.order is None else weight.order.data_ptr()
        pointers = out.data_ptr(), weight.codes.data_ptr(), weight.scales.data_ptr(), zeros, order
        weight_format = QUANTIZED_FORMATS[weight.quantization]
        self._c.dequantize_four_bits(*pointers, *weight.shape, weight_format, code, torch.get_num_threads())
        return out

    def packs(self, dtype: torch.dtype) -> bool:
        """See `Backend.packs`."""
        return packed_bytes(torch.empty(1, 1, dtype=dtype), self.library) > 0

    def num_free_rows(self, dtype: torch.dtype, quantization: Quantization | None = None) -> int:
        """See `Backend.num_free_rows`."""
        # Measured on two cores each, all linears of a layer of 768, bfloat16. With AMX 16 rows take as long as reading;
        # AVX-512: 1, 8, 16 rows take 381, 410, 525 µs; AVX2: 1, 4, 16 rows take 357, 359, 1,082 µs.
        if not self.packs(dtype):
            return 1
        if quantization is None and self.library.has_amx and dtype == torch.bfloat16:
            return 16
        instructions = torch.backends.cpu.get_cpu_capability()
        is_wide = instructions == "AVX512"
        # µs for 1, 2, 4, 8 rows of 4,096 x 4,096. Eight bits: AVX-512 577, 598, 665, 858; AVX2 538, 414, 640, 1,477, in
        # float32 516, 655, 883, 1,920; AMX 935, 996, 1,057, 1,089, and 1,458 for 16 rows. NF4: AVX-512 240, 212, 220,
        # 380, in float32 487, 543, 684, 1,048. int4: AVX2 297, 391, 642, 1,804.
        if quantization is Quantization.INT4 or quantization in STORED:
            return 4 if is_wide and dtype == torch.bfloat16 else 2
        if quantization is Quantization.INT8:
            multiplies_integers = instructions == "AVX2" and dtype == torch.bfloat16
            return 4 if is_wide or multiplies_integers else 2
        return 8 if is_wide else 4

    def decoder_layer(self, parts: DecoderLayerParts) -> DecoderLayer | None:
        """See `Backend.decoder_layer`."""
        linears = (parts.qkv, parts.output, parts.gate_up, parts.down)
        if not all(isinstance(linear, PackedLinear) for linear in linears):
            return None
        return CpuDecoderLayer(parts, self.library, self._step, ComposedDecoderLayer(parts, self))

    def decoder_layers(self, layers: Sequence[DecoderLayer]) -> DecoderLayers | None:
        """See `Backend.decoder_layers`."""
        ours = [layer for layer in layers if isinstance(layer, CpuDecoderLayer)]
        is_one_op = len(ours) == len(layers) and len({layer.shape for layer in ours}) == 1
        return CpuDecoderLayers(ours, self.library, self._step) if is_one_op else None

    def decoder_model(self, parts: DecoderModelParts) -> DecoderModel | None:
        """See `Backend.decoder_model`."""
        layers, head = self.decoder_layers(parts.layers), parts.head
        if not isinstance(layers, CpuDecoderLayers) or not isinstance(head, PackedLinear):
            return None
        return CpuDecoderModel(parts, layers, head, self.library)

    def lora_add(self, y: Tensor, x: Tensor, group: LoraGroup, table: AdapterTable, segments: Segments) -> None:
        """See `Backend.lora_add`."""
        check_lora_add(y, x, group, table, segments)
        if not segments.has_adapter or x.shape[0] == 0:
            return
        code = DTYPE_CODES.get(x.dtype)
        if code is None:
            self._reference.lora_add(y, x, group, table, segments)
            return
        rows = y.data_ptr(), y.stride(0), x.data_ptr(), x.stride(0), x.shape[0]
        self._c.lora_add(*rows, *self._adapters(group, table, segments), code, torch.get_num_threads())
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
        """See `Backend.lora_embed`. If a token id is outside the table, nothing is changed."""
        check_lora_embed(y, token_ids, group, table)
        if not segments.has_adapter or y.shape[0] == 0:
            return
        code = DTYPE_CODES.get(y.dtype)
        if code is None:
            self._reference.lora_embed(y, token_ids, embed_scale, group, table, segments)
            return
        rows = y.data_ptr(), y.stride(0), token_ids.data_ptr(), embed_scale, y.shape[0]
        self._c.lora_embed(*rows, *self._adapters(group, table, segments), code, torch.get_num_threads())

    def kv_write(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        """See `Backend.kv_write`. If a slot is outside the cache, nothing is written."""
        check_kv_write(k, v, k_cache, v_cache, slot_mapping)
        require_cpu("k", k)
        code = DTYPE_CODES.get(k_cache.dtype)
        if code is None:
            self._reference.kv_write(k, v, k_cache, v_cache, slot_mapping)
            return
        self._c.kv_write(
            k.data_ptr(),
            *k.stride()[:2],
            v.data_ptr(),
            *v.stride()[:2],
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            slot_mapping.data_ptr(),
            k.shape[0],
            *k_cache.shape,
            code,
            torch.get_num_threads(),
        )

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
        """See `Backend.rotary_kv_write`. If a slot is outside the cache, nothing is changed."""
        check_rotary_kv_write(q, k, v, cos, sin, k_cache, v_cache, slot_mapping)
        require_cpu("q", q)
        code = DTYPE_CODES.get(k_cache.dtype)
        if code is None:
            self._reference.rotary_kv_write(q, k, v, cos, sin, k_cache, v_cache, slot_mapping)
            return
        num_blocks, num_kv_heads, block_size, head_dim = k_cache.shape
        problem = RotaryStruct(
            q.data_ptr(),
            *q.stride()[:2],
            k.data_ptr(),
            *k.stride()[:2],
            v.data_ptr(),
            *v.stride()[:2],
            cos.data_ptr(),
            sin.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            slot_mapping.data_ptr(),
            *q.shape[:2],
            num_blocks,
            num_kv_heads,
            block_size,
            head_dim,
            cos.shape[1],
        )
        self._c.rotary_kv_write(addressof(problem), code, torch.get_num_threads())

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
        check_paged_attention(q, k_cache, v_cache, batch, sliding_window, softcap, sinks)
        require_cpu("q", q)
        code = DTYPE_CODES.get(k_cache.dtype)
        if code is None:
            return self._reference.paged_attention(
                q,
                k_cache,
                v_cache,
                batch,
                scaling=scaling,
                sliding_window=sliding_window,
                softcap=softcap,
                sinks=sinks,
            )
        if sinks is not None:
            sinks = sinks.to(torch.float32).contiguous()
        out = torch.empty(q.shape, dtype=q.dtype)
        num_blocks, num_kv_heads, block_size, head_dim = k_cache.shape
        num_sequences, max_blocks = batch.block_table.shape
        problem = AttentionStruct(
            q.data_ptr(),
            q.stride(0),
            q.stride(1),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            num_blocks,
            block_size,
            batch.block_table.data_ptr(),
            batch.block_table.stride(0),
            batch.context_lens.data_ptr(),
            batch.row_start.data_ptr(),
            batch.num_rows.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            out.data_ptr(),
            num_sequences,
            q.shape[1],
            num_kv_heads,
            head_dim,
            sliding_window or 0,
            scaling,
            softcap or 0.0,
        )
        self._c.paged_attention(addressof(problem), q.shape[0], max_blocks, code, torch.get_num_threads())
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Backend.rms_norm`."""
        check_rms_norm(x, weight)
        require_cpu("x", x)
        code = DTYPE_CODES.get(x.dtype)
        if code is None:
            return self._reference.rms_norm(x, weight, eps)
        if x.dim() > 3 or x.dim() < 2:
            return self.rms_norm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)
        outer, inner = x.shape[0], x.shape[1] if x.dim() == 3 else 1
        out = torch.empty(x.shape, dtype=x.dtype)
        self._c.rms_norm(
            out.data_ptr(),
            x.data_ptr(),
            outer,
            x.stride(0),
            inner,
            x.stride(-2),
            weight.data_ptr(),
            x.shape[-1],
            eps,
            code,
            torch.get_num_threads(),
        )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `Backend.add_rms_norm`. Two operations: if speed matters, the whole layer is one call anyway."""
        check_add_rms_norm(x, residual, weight)
        total = x + residual
        return total, self.rms_norm(total, weight, eps)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """See `Backend.silu_mul`."""
        check_silu_mul(gate, up)
        require_cpu("gate", gate)
        code = DTYPE_CODES.get(gate.dtype)
        if code is None:
            return self._reference.silu_mul(gate, up)
        out = torch.empty(gate.shape, dtype=gate.dtype)
        self._c.silu_mul(
            out.data_ptr(),
            gate.data_ptr(),
            gate.stride(0),
            up.data_ptr(),
            up.stride(0),
            *gate.shape,
            code,
            torch.get_num_threads(),
        )
        return out

    def argmax(self, logits: Tensor, num_columns: int) -> BestTokens:
        """See `SamplesOnHost.argmax`. 16 x 16,000 bfloat16 logits, within a step: about 75 µs, in numpy 175 µs."""
        check_argmax(logits, num_columns)
        require_cpu("logits", logits)
        code = DTYPE_CODES.get(logits.dtype)
        if code is None:
            return self._reference.argmax(logits, num_columns)
        num_rows = logits.shape[0]
        found = (c_int64 * num_rows)()
        self._c.argmax(
            addressof(found), logits.data_ptr(), logits.stride(0), num_rows, num_columns, code, torch.get_num_threads()
        )
        return best_tokens(found)

    def draw(self, logits: Tensor, num_columns: int, draws: Sequence[Draw]) -> list[int]:
        """See `SamplesOnHost.draw`."""
        check_argmax(logits, num_columns)
        check_draws(draws, logits.shape[0])
        require_cpu("logits", logits)
        if logits.dtype not in DTYPE_CODES:
            logits = logits.float()
        chosen = (c_int64 * len(draws))()
        self._c.draw(
            addressof(chosen),
            pack_draws(draws),
            len(draws),
            logits.data_ptr(),
            logits.stride(0),
            num_columns,
            DTYPE_CODES[logits.dtype],
            torch.get_num_threads(),
        )
        return list(chosen)

    def draw_edited(self, logits: Tensor, num_columns: int, draws: Sequence[EditedDraw]) -> list[int]:
        """See `SamplesOnHost.draw_edited`."""
        check_argmax(logits, num_columns)
        check_edited_draws(draws, logits.shape[0])
        require_cpu("logits", logits)
        if logits.dtype not in DTYPE_CODES:
            logits = logits.float()
        chosen = (c_int64 * len(draws))()
        self._c.edited_draw(
            addressof(chosen),
            pack_edited_draws(draws),
            len(draws),
            logits.data_ptr(),
            logits.stride(0),
            num_columns,
            DTYPE_CODES[logits.dtype],
            torch.get_num_threads(),
        )
        return list(chosen)

    def score(self, logits: Tensor, num_columns: int, queries: Sequence[ScoreQuery]) -> list[Score]:
        """See `SamplesOnHost.score`."""
        check_argmax(logits, num_columns)
        check_score_queries(queries, logits.shape[0], num_columns)
        require_cpu("logits", logits)
        if logits.dtype not in DTYPE_CODES:
            logits = logits.float()
        packed, starts = pack_score_queries(queries, num_columns)
        numbers, logprobs = (c_int64 * starts[-1])(), (c_double * starts[-1])()
        self._c.score(
            addressof(numbers),
            addressof(logprobs),
            packed,
            len(queries),
            logits.data_ptr(),
            logits.stride(0),
            num_columns,
            DTYPE_CODES[logits.dtype],
            torch.get_num_threads(),
        )
        return read_scores(starts, list(numbers), list(logprobs))
