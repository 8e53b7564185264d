"""A whole decoder layer of the Llama-like families: pre-norm attention and a gated MLP, each added to its input."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from loraserve_kernels.adapter_table import AdapterTable, LoraGroup
from loraserve_kernels.linear import Linear
from loraserve_kernels.step_batch import StepBatch


@dataclass(frozen=True, slots=True)
class Norm:
    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class DecoderLayerParts:
    """Linears with the same input are one linear with adjacent outputs: q|k|v and gate|up."""

    qkv: Linear
    output: Linear
    gate_up: Linear
    down: Linear
    lora_groups: tuple[LoraGroup, LoraGroup, LoraGroup, LoraGroup]
    """Of qkv, output, gate_up and down."""
    input_norm: Norm
    mlp_norm: Norm
    q_norm: Norm | None
    """Over each head."""
    k_norm: Norm | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    scaling: float
    sliding_window: int | None
    softcap: float | None


class DecoderLayer(Protocol):
    def __call__(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: StepBatch,
        table: AdapterTable | None,
    ) -> Tensor:
        """x: [T, hidden_size], dense. Returns the same shape, newly allocated.

        rotary: (cos, sin) as for `rotary_kv_write`, or [1, T, rotary_dim].
        """
        ...


class DecoderLayers(Protocol):
    """Several layers, one after the other."""

    def __call__(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        k_caches: Sequence[Tensor],
        v_caches: Sequence[Tensor],
        batch: StepBatch,
        table: AdapterTable | None,
    ) -> Tensor:
        """As `DecoderLayer`; the caches are aligned with the layers."""
        ...
