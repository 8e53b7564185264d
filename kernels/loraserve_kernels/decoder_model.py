"""A whole decoder model: embedding and layers; for sampled rows also final norm, `lm_head`, argmax and draws."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from loraserve_kernels.adapter_table import AdapterTable, LoraGroup
from loraserve_kernels.argmax import BestTokens
from loraserve_kernels.decoder_layer import DecoderLayer, Norm
from loraserve_kernels.linear import Linear
from loraserve_kernels.step_batch import StepBatch


@dataclass(frozen=True, slots=True)
class DecoderModelParts:
    embedding: Tensor | None
    """[num_embeddings, hidden_size]; None = the rows of the head's weight."""
    cos: Tensor
    sin: Tensor
    """cos and sin: [num_positions, rotary_dim], rows as for `rotary_kv_write`."""
    layers: Sequence[DecoderLayer]
    norm: Norm
    head: Linear
    head_group: LoraGroup
    vocab_size: int
    """Leading columns of the logits from which tokens can be chosen."""


@dataclass(slots=True)
class ModelOutput:
    """Results for the sampled rows, unless stated otherwise."""

    logits: Tensor
    """[R, N], with adapters applied; N may exceed the vocabulary's size."""
    best: BestTokens | None = None
    """`SamplesOnHost.argmax` of the logits, if already computed."""
    drawn: list[int] | None = None
    """`SamplesOnHost.draw` of the batch's draws, if already computed."""
    hidden: Tensor | None = None
    """[P, hidden_size]: the last hidden states, after the final norm, of the batch's pooled rows."""


class DecoderModel(Protocol):
    def __call__(
        self, k_caches: Sequence[Tensor], v_caches: Sequence[Tensor], batch: StepBatch, table: AdapterTable | None
    ) -> ModelOutput | None:
        """The output is valid until the next call. The caches are aligned with the layers.

        Returns None, without computing anything, if the batch's adapters may have biases: call the layers instead.
        """
        ...
