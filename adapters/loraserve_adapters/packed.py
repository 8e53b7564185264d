"""The packed form of an adapter: one contiguous buffer and a table, the same bytes in every tier.

Layout: for each group that the adapter touches, the A matrices of its present members, adjacent, `[rank, in_features]`
row-major; then for each present member B as `[rank, out_features]` (transposed from PEFT's `[out_features, rank]`),
and where the adapter has biases, the member's bias `[out_features]`; where it is DoRA, the member's magnitudes and as
many zeros, `[2, out_features]`, in float32 whatever the dtype of the others. Last comes the head of a classifier,
`[num_labels, hidden_size]`, in float32 too. Of experts, A and B of all are adjacent:
`[num_experts * rank, in_features]` and `[num_experts * rank, out_features]`, those of an expert side by side.
Every group's A, every member's B, bias and magnitudes, and the head start at a multiple of 256 bytes. Scaling is not
applied to any of them.

Rows of tokens that were trained are LoRA of as many ranks, of scaling 1: what tells the tokens apart, with a 1 in each
row, is A of an embedding and B of `lm_head`, and the other one is the new rows, of which the base's have to be taken
away.
"""

from dataclasses import dataclass, field

import numpy as np

ALIGNMENT_BYTES = 256


@dataclass(frozen=True, slots=True)
class PackedHead:
    """Where the head of a classifier is."""

    offset: int
    """As those of `PackedTable`."""
    num_labels: int
    hidden_size: int


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """Whose rows of a table are the adapter's."""

    member: int
    """The embedding or `lm_head`."""
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class PackedTable:
    """G groups and M members of the base layout, in its order (members numbered through all groups)."""

    layout_fingerprint: str
    dtype: str
    max_lora_rank: int
    offset_a: np.ndarray
    """int64 [G]: element offset from the start of the payload; -1 where the group is absent."""
    offset_b: np.ndarray
    """int64 [M]: likewise."""
    offset_bias: np.ndarray
    """int64 [M]: likewise."""
    offset_magnitude: np.ndarray
    """int64 [M]: likewise."""
    lora_rank: np.ndarray
    """int32 [M]: 0 = absent."""
    scaling: np.ndarray
    """float32 [M]: lora_alpha / rank, or / sqrt(rank) for rsLoRA."""
    invocation_token_ids: tuple[int, ...] = field(default=(), kw_only=True)
    """Of an activated LoRA, as in `AdapterConfig`."""
    head: PackedHead | None = field(default=None, kw_only=True)
    """Of a classifier."""
    trained_tokens: tuple[PackedTokens, ...] = field(default=(), kw_only=True)

    @property
    def is_finished_by_base(self) -> bool:
        """Whether some of its values are found with the base model's, once it is in the arena."""
        return bool(self.trained_tokens) or bool((self.offset_magnitude >= 0).any())


@dataclass(slots=True)
class PackedAdapter(PackedTable):
    digest: str
    """sha256 of the source: canonical config and every tensor's name, dtype, shape and bytes."""
    payload: np.ndarray
    """uint8 [size_bytes], may be a read-only mapping of the packed file."""

    @property
    def size_bytes(self) -> int:
        return int(self.payload.nbytes)
