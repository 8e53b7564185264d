"""A whole model as one call into `csrc/decoder_model.c`."""

from collections.abc import Sequence
from ctypes import addressof, c_int64

import torch
from torch import Tensor

from loraserve_kernels.adapter_table import AdapterTable
from loraserve_kernels.argmax import best_tokens
from loraserve_kernels.bound_group import BoundGroup, bind_group
from loraserve_kernels.checks import mismatch, require_dense
from loraserve_kernels.cpu_calls import DTYPE_CODES, DecoderModelStruct, ModelStepStruct
from loraserve_kernels.cpu_decoder_layer import CpuDecoderLayers, may_have_biases, step_struct
from loraserve_kernels.cpu_library import CpuLibrary
from loraserve_kernels.decoder_model import DecoderModelParts, ModelOutput
from loraserve_kernels.draw import check_draws, pack_draws
from loraserve_kernels.lora_add import check_segments
from loraserve_kernels.packed_linear import PackedLinear
from loraserve_kernels.step_batch import StepBatch


class CpuDecoderModel:
    """See `DecoderModel`. Results are bit for bit those of the separate ops."""

    def __init__(
        self,
        parts: DecoderModelParts,
        layers: CpuDecoderLayers,
        head: PackedLinear,
        library: CpuLibrary,
    ) -> None:
        """layers, head: the layers and head of `parts`, as this backend's types."""
        _check(parts, layers, head)
        self._parts = parts
        self._layers = layers
        self._head = head
        self._struct = DecoderModelStruct(
            num_layers=len(parts.layers),
            hidden_size=layers.shape.hidden_size,
            embedding=None if parts.embedding is None else parts.embedding.data_ptr(),
            num_embeddings=head.out_features if parts.embedding is None else parts.embedding.shape[0],
            cosine=parts.cos.data_ptr(),
            sine=parts.sin.data_ptr(),
            num_positions=parts.cos.shape[0],
            rotary_dim=parts.cos.shape[1],
            norm=parts.norm.weight.data_ptr(),
            head=head.struct,
            vocab_size=parts.vocab_size,
            eps=parts.norm.eps,
        )
        self._struct.layers = addressof(layers.addresses)
        self._function = library.functions.decoder_model
        self._head_group: BoundGroup | None = None
        self._batch: StepBatch | None = None
        self._with_adapters = False
        self._step = ModelStepStruct()
        self._logits = torch.empty(0)
        self._best = (c_int64 * 0)()
        """This, `_logits` and `_step` belong to `_batch`."""

    def __call__(
        self, k_caches: Sequence[Tensor], v_caches: Sequence[Tensor], batch: StepBatch, table: AdapterTable | None
    ) -> ModelOutput | None:
        """See `DecoderModel`. If an index is out of range, nothing is changed."""
        if may_have_biases(batch, table):
            return None
        shape = self._layers.shape
        self._layers.bind(k_caches, v_caches, table)
        if table is not None:
            self._bind_head(table)
        lora = table is not None and batch.segments.has_adapter
        if self._batch is not batch or self._with_adapters != lora:
            self._step = _model_step(batch, shape.dtype, lora=lora)
            self._batch, self._with_adapters = batch, lora
            num_sampled = self._step.layers.num_wanted
            self._logits = torch.empty((num_sampled, self._head.out_features), dtype=shape.dtype)
            self._best = (c_int64 * num_sampled)()
        draws = batch.draws
        check_draws(draws, len(self._best))
        drawn = (c_int64 * len(draws))()
        self._function(
            addressof(self._struct),
            addressof(self._step),
            self._logits.data_ptr(),
            addressof(self._best),
            pack_draws(draws),
            len(draws),
            addressof(drawn),
            DTYPE_CODES[shape.dtype],
            torch.get_num_threads(),
        )
        return ModelOutput(self._logits, best_tokens(self._best), list(drawn))

    def _bind_head(self, table: AdapterTable) -> None:
        """Take the addresses of the head's columns in the table, for later calls."""
        if self._head_group is None or not self._head_group.is_for(self._parts.head_group, table):
            bound = self._head_group = bind_group(self._parts.head_group, table)
            self._struct.head_group, self._struct.head_table = bound.group_address, bound.table_address


def _model_step(batch: StepBatch, dtype: torch.dtype, *, lora: bool) -> ModelStepStruct:
    layers = step_struct(batch, None, dtype, lora=lora)
    for name, tensor in (("token_ids", batch.token_ids), ("positions", batch.positions)):
        require_dense(name, tensor, torch.int64)
        if tensor.shape != (layers.num_rows,):
            raise mismatch(name, list(tensor.shape), [layers.num_rows])
    require_dense("sampled_rows", batch.sampled_rows, torch.int64)
    layers.wanted_rows, layers.num_wanted = batch.sampled_rows.data_ptr(), batch.sampled_rows.shape[0]
    if lora:
        segments = batch.sampled_segments
        check_segments(segments)
        layers.wanted_segment_start = segments.start.data_ptr()
        layers.wanted_segment_adapter_slot = segments.adapter_slot.data_ptr()
        layers.num_wanted_segments = segments.adapter_slot.shape[0]
    return ModelStepStruct(layers, batch.token_ids.data_ptr(), batch.positions.data_ptr())


def _check(parts: DecoderModelParts, layers: CpuDecoderLayers, head: PackedLinear) -> None:
    shape = layers.shape
    for name, tensor in (
        *([] if parts.embedding is None else [("embedding", parts.embedding)]),
        ("cos", parts.cos),
        ("sin", parts.sin),
        ("norm", parts.norm.weight),
    ):
        require_dense(name, tensor, shape.dtype)
    if parts.embedding is not None and parts.embedding.shape[1:] != (shape.hidden_size,):
        raise mismatch("embedding", list(parts.embedding.shape), f"[num_embeddings, {shape.hidden_size}]")
    if parts.norm.weight.shape != (shape.hidden_size,):
        raise mismatch("norm", list(parts.norm.weight.shape), [shape.hidden_size])
    rotary_dim = parts.cos.shape[-1]
    if parts.cos.dim() != 2 or parts.sin.shape != parts.cos.shape or rotary_dim % 2 or rotary_dim > shape.head_dim:
        raise mismatch("cos", list(parts.cos.shape), f"[num_positions, an even rotary_dim of at most {shape.head_dim}]")
    if (head.in_features, head.dtype) != (shape.hidden_size, shape.dtype):
        raise mismatch("head", f"[*, {head.in_features}] {head.dtype}", f"[*, {shape.hidden_size}] {shape.dtype}")
    group = parts.head_group
    if (group.in_features, sum(group.out_features)) != (head.in_features, head.out_features):
        raise mismatch("head_group", group, f"{head.in_features} to {head.out_features} features, as the head")
    if not 0 < parts.vocab_size <= head.out_features:
        raise mismatch("vocab_size", parts.vocab_size, f"1 to {head.out_features}, the head's outputs")
