"""A whole model of decoder layers: embedding, layers, final norm and `lm_head`, the last two of the sampled rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from loraserve_kernels.adapter_table import AdapterTable
from loraserve_kernels.backend import Linear
from loraserve_kernels.decoder_layer import DecoderLayer, Norm
from loraserve_kernels.step_batch import StepBatch


@dataclass(frozen=True, slots=True)
class DecoderModelParts:
    embedding: Tensor
    """[vocab_size, hidden_size]."""
    cos: Tensor
    sin: Tensor
    """[num_positions, rotary_dim]: of each position, as for `rotary_kv_write`."""
    layers: Sequence[DecoderLayer]
    norm: Norm
    head: Linear


class DecoderModel(Protocol):
    def __call__(
        self, k_caches: Sequence[Tensor], v_caches: Sequence[Tensor], batch: StepBatch, table: AdapterTable | None
    ) -> tuple[Tensor, Tensor] | None:
        """(what `head` is given: [R, hidden_size], what it gives: [R, N]), newly allocated.

        The head's adapters are not added. The caches are aligned with the layers. None, and nothing is done, for a
        batch that takes the layers' own way: one whose adapters may have biases.
        """
        ...
