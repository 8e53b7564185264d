"""Calling conventions of the C functions of `csrc/`: dtypes, structures, arguments and statuses, as in its headers."""

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path

import torch

from loraserve_kernels.quantization import Quantization

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
PLAIN, COMPRESSED = range(2)
QUANTIZED_FORMATS = {
    Quantization.INT8: 2,
    Quantization.INT4: 3,
    Quantization.MXFP4: 4,
    Quantization.NF4: 5,
    Quantization.UINT4: 6,
    Quantization.UINT4_G128: 7,
}
"""`enum weight_format` of packed_linear.h."""

STATUS_MESSAGES = {
    1: "row ranges of segments or sequences do not match the rows of the batch or its block table",
    2: "an adapter slot, rank or offset points outside the adapter table or its arena",
    3: "slot_mapping has an entry outside the KV cache",
    4: "block_table has a block id outside the KV cache within a context",
    6: "a token id, position or sampled row is out of range, or sampled rows are not in ascending order",
    7: "a state slot is outside the states, or a state is to be saved after rows that its sequence does not have",
}
MAX_TAPS = 16
"""Of `causal_conv`."""


class PackedLinearStruct(ctypes.Structure):
    """`struct packed_linear` of packed_linear.h."""

    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("num_outputs", c_int64),
        ("depth", c_int64),
        ("format", c_int64),
        ("order", c_void_p),
    )


class LoraGroupStruct(ctypes.Structure):
    """`struct group` of lora_add.h."""

    _fields_ = (("in_features", c_int64), ("num_members", c_int64), ("out_features", c_void_p))


class AdapterTableStruct(ctypes.Structure):
    """`struct table` of lora_add.h."""

    _fields_ = (
        ("arena", c_void_p),
        ("arena_size", c_int64),
        ("offset_a", c_void_p),
        ("stride_a", c_int64),
        ("offset_b", c_void_p),
        ("lora_rank", c_void_p),
        ("scaling", c_void_p),
        ("stride_members", c_int64),
        ("num_slots", c_int64),
        ("offset_magnitude", c_void_p),
        ("elements_per_float", c_int64),
    )


class AttentionStruct(ctypes.Structure):
    """`struct attention` of paged_attention.h."""

    _fields_ = (
        ("q", c_void_p),
        ("q_row_stride", c_int64),
        ("q_head_stride", c_int64),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("num_blocks", c_int64),
        ("block_size", c_int64),
        ("block_table", c_void_p),
        ("block_table_stride", c_int64),
        ("context_lens", c_void_p),
        ("row_start", c_void_p),
        ("num_rows", c_void_p),
        ("sinks", c_void_p),
        ("out", c_void_p),
        ("num_sequences", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("sliding_window", c_int64),
        ("scaling", c_float),
        ("softcap", c_float),
    )


class RotaryStruct(ctypes.Structure):
    """`struct rotary` of row_ops.h."""

    _fields_ = (
        ("q", c_void_p),
        ("q_row_stride", c_int64),
        ("q_head_stride", c_int64),
        ("k", c_void_p),
        ("k_row_stride", c_int64),
        ("k_head_stride", c_int64),
        ("v", c_void_p),
        ("v_row_stride", c_int64),
        ("v_head_stride", c_int64),
        ("cosine", c_void_p),
        ("sine", c_void_p),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("slot_mapping", c_void_p),
        ("num_rows", c_int64),
        ("num_heads", c_int64),
        ("num_blocks", c_int64),
        ("num_kv_heads", c_int64),
        ("block_size", c_int64),
        ("head_dim", c_int64),
        ("rotary_dim", c_int64),
    )


class DecoderLayerStruct(ctypes.Structure):
    """`struct decoder_layer` of decoder_layer.c."""

    _fields_ = (
        ("linears", PackedLinearStruct * 4),
        ("groups", c_void_p * 4),
        ("tables", c_void_p * 4),
        ("input_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("num_blocks", c_int64),
        ("num_kv_heads", c_int64),
        ("block_size", c_int64),
        ("head_dim", c_int64),
        ("num_heads", c_int64),
        ("hidden_size", c_int64),
        ("intermediate_size", c_int64),
        ("sliding_window", c_int64),
        ("input_eps", c_float),
        ("mlp_eps", c_float),
        ("q_eps", c_float),
        ("k_eps", c_float),
        ("scaling", c_float),
        ("softcap", c_float),
    )


class LayerStepStruct(ctypes.Structure):
    """`struct layer_step` of decoder_layer.h."""

    _fields_ = (
        ("num_rows", c_int64),
        ("num_sequences", c_int64),
        ("max_blocks", c_int64),
        ("cosine", c_void_p),
        ("sine", c_void_p),
        ("rotary_dim", c_int64),
        ("slot_mapping", c_void_p),
        ("block_table", c_void_p),
        ("block_table_stride", c_int64),
        ("context_lens", c_void_p),
        ("row_start", c_void_p),
        ("sequence_rows", c_void_p),
        ("segment_start", c_void_p),
        ("segment_adapter_slot", c_void_p),
        ("num_segments", c_int64),
        ("wanted_rows", c_void_p),
        ("num_wanted", c_int64),
        ("wanted_segment_start", c_void_p),
        ("wanted_segment_adapter_slot", c_void_p),
        ("num_wanted_segments", c_int64),
    )


class DecoderModelStruct(ctypes.Structure):
    """`struct decoder_model` of decoder_model.c."""

    _fields_ = (
        ("layers", c_void_p),
        ("num_layers", c_int64),
        ("hidden_size", c_int64),
        ("embedding", c_void_p),
        ("num_embeddings", c_int64),
        ("cosine", c_void_p),
        ("sine", c_void_p),
        ("num_positions", c_int64),
        ("rotary_dim", c_int64),
        ("norm", c_void_p),
        ("head", PackedLinearStruct),
        ("head_group", c_void_p),
        ("head_table", c_void_p),
        ("vocab_size", c_int64),
        ("eps", c_float),
    )


class ModelStepStruct(ctypes.Structure):
    """`struct model_step` of decoder_model.c."""

    _fields_ = (
        ("layers", LayerStepStruct),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
    )


class SequencesStruct(ctypes.Structure):
    """`struct sequences` of recurrent.h."""

    _fields_ = (
        ("row_start", c_void_p),
        ("num_rows", c_void_p),
        ("read", c_void_p),
        ("write", c_void_p),
        ("save", c_void_p),
        ("num_rows_saved", c_void_p),
        ("num_sequences", c_int64),
        ("total_rows", c_int64),
        ("num_slots", c_int64),
    )


class CausalConvStruct(ctypes.Structure):
    """`struct causal_conv` of causal_conv.c."""

    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("state", c_void_p),
        ("out", c_void_p),
        ("num_channels", c_int64),
        ("num_taps", c_int64),
        ("silu", c_int64),
        ("sequences", SequencesStruct),
    )


class GatedDeltaRuleStruct(ctypes.Structure):
    """`struct gated_delta_rule` of gated_delta_rule.c."""

    _fields_ = (
        ("q", c_void_p),
        ("q_row_stride", c_int64),
        ("q_head_stride", c_int64),
        ("k", c_void_p),
        ("k_row_stride", c_int64),
        ("k_head_stride", c_int64),
        ("v", c_void_p),
        ("v_row_stride", c_int64),
        ("v_head_stride", c_int64),
        ("log_decay", c_void_p),
        ("log_decay_stride", c_int64),
        ("beta", c_void_p),
        ("beta_stride", c_int64),
        ("state", c_void_p),
        ("out", c_void_p),
        ("num_k_heads", c_int64),
        ("num_v_heads", c_int64),
        ("k_dim", c_int64),
        ("v_dim", c_int64),
        ("normalize", c_int64),
        ("sequences", SequencesStruct),
    )


class SelectiveScanStruct(ctypes.Structure):
    """`struct selective_scan` of selective_scan.c."""

    _fields_ = (
        ("x", c_void_p),
        ("x_row_stride", c_int64),
        ("x_head_stride", c_int64),
        ("dt", c_void_p),
        ("dt_stride", c_int64),
        ("b", c_void_p),
        ("b_row_stride", c_int64),
        ("b_group_stride", c_int64),
        ("c", c_void_p),
        ("c_row_stride", c_int64),
        ("c_group_stride", c_int64),
        ("a", c_void_p),
        ("d", c_void_p),
        ("dt_bias", c_void_p),
        ("state", c_void_p),
        ("out", c_void_p),
        ("num_heads", c_int64),
        ("num_groups", c_int64),
        ("head_dim", c_int64),
        ("state_dim", c_int64),
        ("softplus", c_int64),
        ("dt_min", c_float),
        ("dt_max", c_float),
        ("sequences", SequencesStruct),
    )


class LatentStruct(ctypes.Structure):
    """`struct latent` of latent.c."""

    _fields_ = (
        ("x", c_void_p),
        ("x_row_stride", c_int64),
        ("x_head_stride", c_int64),
        ("weight", c_void_p),
        ("out", c_void_p),
        ("num_rows", c_int64),
        ("num_heads", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("latent_dim", c_int64),
        ("rotary_dim", c_int64),
        ("group", c_void_p),
        ("table", c_void_p),
        ("segment_start", c_void_p),
        ("segment_adapter", c_void_p),
        ("num_segments", c_int64),
    )


POINTER_STRIDE = [c_void_p, c_int64]
SIGNATURES = {
    "amx_enable": [c_int],
    "lora_add": [*POINTER_STRIDE * 2, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int, c_int],
    "lora_embed": [*POINTER_STRIDE, c_void_p, c_float, c_int64, *[c_void_p] * 4, c_int64, c_int, c_int],
    "kv_write": [*[c_void_p, c_int64, c_int64] * 2, *[c_void_p] * 3, *[c_int64] * 5, c_int, c_int],
    "paged_attention": [c_void_p, c_int64, c_int64, c_int, c_int],
    "rotary_kv_write": [c_void_p, c_int, c_int],
    "rms_norm": [c_void_p, c_void_p, *[c_int64] * 4, c_void_p, c_int64, c_float, c_int, c_int],
    "linear_rowmajor": [*POINTER_STRIDE * 2, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_int, c_int],
    "argmax": [c_void_p, *POINTER_STRIDE, c_int64, c_int64, c_int, c_int],
    "draw": [c_void_p, c_void_p, c_int64, *POINTER_STRIDE, c_int64, c_int, c_int],
    "edited_draw": [c_void_p, c_void_p, c_int64, *POINTER_STRIDE, c_int64, c_int, c_int],
    "score": [c_void_p, c_void_p, c_void_p, c_int64, *POINTER_STRIDE, c_int64, c_int, c_int],
    "silu_mul": [c_void_p, *POINTER_STRIDE * 2, c_int64, c_int64, c_int, c_int],
    "causal_conv": [c_void_p, c_int, c_int],
    "gated_delta_rule": [c_void_p, c_int, c_int],
    "selective_scan": [c_void_p, c_int, c_int],
    "absorb_keys": [c_void_p, c_int, c_int],
    "expand_values": [c_void_p, c_int, c_int],
    "pack_weight": [c_void_p, c_void_p, c_int64, c_int64, c_int, c_int],
    "packed_weight_bytes": [c_int64, c_int64, c_int],
    "compress_weight": [c_void_p, c_void_p, c_int64, c_int64, c_int],
    "compressed_weight_bytes": [c_void_p, c_int64, c_int64, c_int, c_int],
    "round_weight": [c_void_p, c_void_p, c_int64, c_int64, c_int, c_int, c_int],
    "quantize_weight": [c_void_p, c_void_p, c_int64, c_int64, c_int, c_int, c_int],
    "quantized_weight_bytes": [c_int64, c_int64, c_int, c_int],
    "pack_four_bits": [*[c_void_p] * 5, c_int64, c_int64, c_int, c_int],
    "dequantize_four_bits": [*[c_void_p] * 5, c_int64, c_int64, c_int, c_int, c_int],
    "packed_rows": [c_void_p, c_void_p, c_void_p, c_int64, c_int, c_int],
    "packed_linear": [c_void_p, *POINTER_STRIDE * 2, c_int64, c_int, c_int],
    "decoder_layers": [c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int, c_int],
    "decoder_model": [c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int, c_int],
}


def open_functions(path: Path) -> ctypes.CDLL:
    """Load the library and declare its functions, which raise as `_check_status` does. Raises `OSError`."""
    library = ctypes.CDLL(str(path))
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        if name.endswith("_bytes"):
            function.restype = c_int64
        elif name != "amx_enable":
            function.errcheck = _check_status
    return library


def _check_status(status: int, _function: object, _arguments: object) -> None:
    """Raise `ValueError` for arguments that the function refused, `MemoryError` if it ran out of memory."""
    if status == 0:
        return
    message = STATUS_MESSAGES.get(status)
    if message is None:
        raise MemoryError(f"not enough memory for a CPU kernel's scratch space (status {status})")
    raise ValueError(message)
