"""Decoder layers as one call into `csrc/decoder_layer.c`."""

from collections.abc import Sequence
from ctypes import addressof, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from loraserve_kernels.adapter_table import AdapterTable
from loraserve_kernels.bound_group import BoundGroup, bind_group
from loraserve_kernels.checks import mismatch, require_dense, require_like, require_rows
from loraserve_kernels.cpu_calls import DTYPE_CODES, DecoderLayerStruct, LayerStepStruct
from loraserve_kernels.cpu_library import CpuLibrary
from loraserve_kernels.decoder_layer import DecoderLayer, DecoderLayerParts, Norm
from loraserve_kernels.lora_add import check_segments
from loraserve_kernels.packed_linear import PackedLinear
from loraserve_kernels.paged_attention import check_sequences
from loraserve_kernels.step_batch import StepBatch


class StepAddresses:
    """The part of a call's arguments that all layers share; made once per step."""

    def __init__(self) -> None:
        self._batch: StepBatch | None = None
        self._rotary: tuple[Tensor, Tensor] | None = None
        self._with_adapters = False
        self._struct = LayerStepStruct()

    def address(self, batch: StepBatch, rotary: tuple[Tensor, Tensor] | None, dtype: torch.dtype, *, lora: bool) -> int:
        """Address of a `struct layer_step`; valid until the next call."""
        if self._batch is not batch or self._rotary is not rotary or self._with_adapters != lora:
            self._struct = step_struct(batch, rotary, dtype, lora=lora)
            self._batch, self._rotary, self._with_adapters = batch, rotary, lora
        return addressof(self._struct)


class LayerShape(NamedTuple):
    hidden_size: int
    head_dim: int
    dtype: torch.dtype


class CpuDecoderLayer:
    """See `DecoderLayer`. All linears are `PackedLinear`s of one library.

    A row's result does not depend on other rows in the batch, bit for bit.
    """

    def __init__(
        self, parts: DecoderLayerParts, library: CpuLibrary, step: StepAddresses, composed: DecoderLayer
    ) -> None:
        """composed: the layer of separate ops, for the rare adapters with biases, which the C function does not add."""
        linears = [parts.qkv, parts.output, parts.gate_up, parts.down]
        packed = [linear for linear in linears if isinstance(linear, PackedLinear)]
        assert len(packed) == len(linears), "all linears must be packed"
        _check_sizes(parts, packed)
        self.composed = composed
        self.shape = LayerShape(packed[0].in_features, parts.head_dim, packed[0].dtype)
        self._parts = parts
        self._struct = DecoderLayerStruct(
            num_kv_heads=parts.num_kv_heads,
            head_dim=parts.head_dim,
            num_heads=parts.num_heads,
            hidden_size=self.shape.hidden_size,
            intermediate_size=parts.intermediate_size,
            sliding_window=parts.sliding_window or 0,
            scaling=parts.scaling,
            softcap=parts.softcap or 0.0,
        )
        for i, linear in enumerate(packed):
            self._struct.linears[i] = linear.struct
        norms = (("input", parts.input_norm), ("mlp", parts.mlp_norm), ("q", parts.q_norm), ("k", parts.k_norm))
        for name, norm in norms:
            if norm is not None:
                setattr(self._struct, f"{name}_norm", norm.weight.data_ptr())
                setattr(self._struct, f"{name}_eps", norm.eps)
        self.address = addressof(self._struct)
        self._caches: tuple[Tensor, Tensor] | None = None
        self._table: AdapterTable | None = None
        self._groups: list[BoundGroup] = []
        self._alone = CpuDecoderLayers([self], library, step)

    def __call__(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: StepBatch,
        table: AdapterTable | None,
    ) -> Tensor:
        """See `DecoderLayer`. If an index is out of range, nothing is changed."""
        return self._alone(x, rotary, [k_cache], [v_cache], batch, table)

    def bind(self, k_cache: Tensor, v_cache: Tensor, table: AdapterTable | None) -> None:
        """Take the addresses of these tensors for later calls."""
        if self._caches is None or self._caches[0] is not k_cache or self._caches[1] is not v_cache:
            self._bind_caches(k_cache, v_cache)
        if table is not None and not self._is_bound_to(table):
            self._bind_table(table)

    def _is_bound_to(self, table: AdapterTable) -> bool:
        return self._table is table and self._groups[0].is_for(self._parts.lora_groups[0], table)

    def _bind_caches(self, k_cache: Tensor, v_cache: Tensor) -> None:
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            require_dense(name, cache, self.shape.dtype)
            if cache.dim() != 4 or cache.shape[1] != self._parts.num_kv_heads or cache.shape[3] != self._parts.head_dim:
                expected = f"[num_blocks, {self._parts.num_kv_heads}, block_size, {self._parts.head_dim}]"
                raise mismatch(name, list(cache.shape), expected)
        if k_cache.shape != v_cache.shape:
            raise mismatch("v_cache", list(v_cache.shape), f"{list(k_cache.shape)}, as k_cache")
        self._struct.k_cache, self._struct.v_cache = k_cache.data_ptr(), v_cache.data_ptr()
        self._struct.num_blocks, self._struct.block_size = k_cache.shape[0], k_cache.shape[2]
        self._caches = (k_cache, v_cache)

    def _bind_table(self, table: AdapterTable) -> None:
        require_like("the adapters", table.arena, "the layer", self._parts.input_norm.weight)
        self._groups = [bind_group(group, table) for group in self._parts.lora_groups]
        for i, group in enumerate(self._groups):
            self._struct.groups[i] = group.group_address
            self._struct.tables[i] = group.table_address
        self._table = table


class CpuDecoderLayers:
    """See `DecoderLayers`. All layers have one shape.

    Decode of 16 rows, 12 layers of hidden size 768, two Xeon cores: 10.2 ms a step with a call per layer, 10.0 in one.
    """

    def __init__(self, layers: Sequence[CpuDecoderLayer], library: CpuLibrary, step: StepAddresses) -> None:
        self.shape = layers[0].shape
        self.addresses = (c_void_p * len(layers))(*(layer.address for layer in layers))
        """Addresses of one `struct decoder_layer` per layer."""
        self._layers = list(layers)
        self._step = step
        self._function = library.functions.decoder_layers

    def __call__(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        k_caches: Sequence[Tensor],
        v_caches: Sequence[Tensor],
        batch: StepBatch,
        table: AdapterTable | None,
    ) -> Tensor:
        """See `DecoderLayers`. If an index is out of range, nothing is changed."""
        if may_have_biases(batch, table):
            for layer, k_cache, v_cache in zip(self._layers, k_caches, v_caches, strict=True):
                x = layer.composed(x, rotary, k_cache, v_cache, batch, table)
            return x
        self.bind(k_caches, v_caches, table)
        shape = self.shape
        require_rows("x", x, shape.hidden_size)
        require_dense("x", x, shape.dtype)
        if x.shape[0] != batch.slot_mapping.shape[0]:
            raise mismatch("x", f"{x.shape[0]} rows", f"{batch.slot_mapping.shape[0]}, as the batch")
        if rotary is not None and rotary[0].shape[-1] > shape.head_dim:
            raise mismatch("cos", list(rotary[0].shape), f"a rotary_dim of at most {shape.head_dim}")
        out = torch.empty_like(x)
        step = self._step.address(batch, rotary, shape.dtype, lora=table is not None and batch.segments.has_adapter)
        self._function(
            self.addresses,
            len(self._layers),
            step,
            x.data_ptr(),
            out.data_ptr(),
            DTYPE_CODES[shape.dtype],
            torch.get_num_threads(),
        )
        return out

    def bind(self, k_caches: Sequence[Tensor], v_caches: Sequence[Tensor], table: AdapterTable | None) -> None:
        """As `CpuDecoderLayer.bind`; the caches are aligned with the layers."""
        for layer, k_cache, v_cache in zip(self._layers, k_caches, v_caches, strict=True):
            layer.bind(k_cache, v_cache, table)


def may_have_biases(batch: StepBatch, table: AdapterTable | None) -> bool:
    """Whether an adapter of the batch may have biases, which the C functions do not add."""
    return table is not None and table.num_biased > 0 and batch.segments.has_adapter


def _check_sizes(parts: DecoderLayerParts, packed: list[PackedLinear]) -> None:
    hidden_size, attended = packed[0].in_features, parts.num_heads * parts.head_dim
    expected = [
        (hidden_size, attended + 2 * parts.num_kv_heads * parts.head_dim),
        (attended, hidden_size),
        (hidden_size, 2 * parts.intermediate_size),
        (parts.intermediate_size, hidden_size),
    ]
    sizes = [(linear.in_features, linear.out_features) for linear in packed]
    if sizes != expected:
        raise mismatch("the linears' sizes", sizes, expected)
    groups = [(group.in_features, sum(group.out_features)) for group in parts.lora_groups]
    if groups != sizes:
        raise mismatch("lora_groups", groups, f"{sizes}, as the linears")
    for name, norm, size in (
        ("input_norm", parts.input_norm, hidden_size),
        ("mlp_norm", parts.mlp_norm, hidden_size),
        ("q_norm", parts.q_norm, parts.head_dim),
        ("k_norm", parts.k_norm, parts.head_dim),
    ):
        if norm is not None:
            _check_norm(name, norm, size, packed[0].dtype)


def _check_norm(name: str, norm: Norm, size: int, dtype: torch.dtype) -> None:
    require_dense(name, norm.weight, dtype)
    if norm.weight.shape != (size,):
        raise mismatch(name, list(norm.weight.shape), [size])


def step_struct(
    batch: StepBatch, rotary: tuple[Tensor, Tensor] | None, dtype: torch.dtype, *, lora: bool
) -> LayerStepStruct:
    """The arguments that all layers share. The batch's tensors and rotary must outlive it."""
    require_dense("slot_mapping", batch.slot_mapping, torch.int64)
    check_sequences(batch)
    num_rows, table = batch.slot_mapping.shape[0], batch.block_table
    struct = LayerStepStruct(
        num_rows=num_rows,
        num_sequences=table.shape[0],
        max_blocks=table.shape[1],
        slot_mapping=batch.slot_mapping.data_ptr(),
        block_table=table.data_ptr(),
        block_table_stride=table.stride(0),
        context_lens=batch.context_lens.data_ptr(),
        row_start=batch.row_start.data_ptr(),
        sequence_rows=batch.num_rows.data_ptr(),
        num_wanted=num_rows,
    )
    if rotary is not None:
        rotary_dim = rotary[0].shape[-1]
        for name, tensor in zip(("cos", "sin"), rotary, strict=True):
            require_dense(name, tensor, dtype)
            if tensor.numel() != num_rows * rotary_dim or tensor.shape[-1] != rotary_dim or rotary_dim % 2:
                raise mismatch(name, list(tensor.shape), f"[{num_rows}, an even rotary_dim]")
        struct.cosine, struct.sine, struct.rotary_dim = rotary[0].data_ptr(), rotary[1].data_ptr(), rotary_dim
    if lora:
        check_segments(batch.segments)
        struct.segment_start = batch.segments.start.data_ptr()
        struct.segment_adapter_slot = batch.segments.adapter_slot.data_ptr()
        struct.num_segments = batch.segments.adapter_slot.shape[0]
    return struct
