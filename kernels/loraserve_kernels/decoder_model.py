"""A whole model of decoder layers: embedding, layers and, of sampled rows, final norm, `lm_head`, argmax and draws."""

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
    """[num_embeddings, hidden_size]; None: the rows of the head's weight."""
    cos: Tensor
    sin: Tensor
    """[num_positions, rotary_dim]: of each position, as for `rotary_kv_write`."""
    layers: Sequence[DecoderLayer]
    norm: Norm
    head: Linear
    head_group: LoraGroup
    vocab_size: int
    """Columns of the logits that a token can be chosen from."""


@dataclass(slots=True)
class ModelOutput:
    """Of the sampled rows, unless said otherwise."""

    logits: Tensor
    """[R, N], adapters added; N may be more than there are tokens."""
    best: BestTokens | None = None
    """`SamplesOnHost.argmax` of them, where it came with them."""
    drawn: list[int] | None = None
    """Of the batch's draws, as `SamplesOnHost.draw` has them, where they came with them."""
    hidden: Tensor | None = None
    """[P, hidden_size]: the last hidden states, behind the final norm, of the batch's pooled rows."""


class DecoderModel(Protocol):
    def __call__(
        self, k_caches: Sequence[Tensor], v_caches: Sequence[Tensor], batch: StepBatch, table: AdapterTable | None
    ) -> ModelOutput | None:
        """Valid until the next call. The caches are aligned with the layers.

        None, and nothing is done, for a batch that takes the layers' own way: one whose adapters may have biases.
        """
        ...
