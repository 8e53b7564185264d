"""The packed form of an adapter: one contiguous buffer and a table, the same bytes in every tier.

The buffer has, for each group that the adapter touches:

- the A matrices of the group's present members, adjacent, each `[rank, in_features]` row-major;
- then for each present member B as `[rank, out_features]` (transposed from PEFT's `[out_features, rank]`); its bias
  `[out_features]`, if the adapter has biases; for DoRA, its magnitudes and as many zeros, `[2, out_features]`, in
  float32 whatever the dtype of the others.

A classifier's head comes last, `[num_labels, hidden_size]`, also in float32. For experts, A and B of all experts are
`[num_experts * rank, in_features]` and `[num_experts * rank, out_features]`, with the rows of each expert adjacent.
Every group's A, every member's B, bias and magnitudes, and the head start at a multiple of 256 bytes. Scaling is not
applied to any of them.

An own table, the embedding or `lm_head`, is `[num_rows, hidden_size]` in the adapter's dtype, after its member's other
parts, and starts at a multiple of 256 bytes, too.

Rows of trained tokens are LoRA with a rank for each token and a scaling of 1. One matrix, A for an embedding and B for
`lm_head`, is the selector, which has a 1 in each row for its token. The other has the new rows, from which the base's
still have to be subtracted.
"""

from dataclasses import dataclass, field

import numpy as np

ALIGNMENT_BYTES = 256


@dataclass(frozen=True, slots=True)
class PackedHead:
    """Where a classifier's head is."""

    offset: int
    """In elements, like the offsets of `PackedTable`."""
    num_labels: int
    hidden_size: int


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """Tokens whose rows of a table are the adapter's."""

    member: int
    """That of the embedding or `lm_head`."""
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PackedOwnTable:
    """A whole embedding or `lm_head` that the adapter has in place of the base's."""

    group_index: int
    member: int
    offset: int
    """In elements, like the offsets of `PackedTable`."""
    num_rows: int
    hidden_size: int


@dataclass(slots=True)
class PackedTable:
    """G groups and M members of the base layout, in its order (members numbered through all groups)."""

    layout_fingerprint: str
    dtype: str
    max_lora_rank: int
    offset_a: np.ndarray
    """int64 [G]: element offset from the start of the payload; -1 if the group is absent."""
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
    """For an activated LoRA, as in `AdapterConfig`."""
    head: PackedHead | None = field(default=None, kw_only=True)
    """For a classifier only."""
    trained_tokens: tuple[PackedTokens, ...] = field(default=(), kw_only=True)
    own_tables: tuple[PackedOwnTable, ...] = field(default=(), kw_only=True)

    @property
    def group_starts(self) -> np.ndarray:
        """int64 [G]: `offset_a`, or where there is none the offset of the group's own table; -1 = no data."""
        starts = self.offset_a.copy()
        for own in self.own_tables:
            if starts[own.group_index] < 0:
                starts[own.group_index] = own.offset
        return starts

    @property
    def is_finished_by_base(self) -> bool:
        """Whether some of its values must be computed with the base model's, once it is in the arena."""
        return bool(self.trained_tokens) or bool((self.offset_magnitude >= 0).any())


@dataclass(slots=True)
class PackedAdapter:
    digest: str
    """sha256 of the source: canonical config and every tensor's name, dtype, shape and bytes."""
    table: PackedTable
    payload: np.ndarray
    """uint8 [size_bytes], may be a read-only mapping of the packed file, which stays open while this is referenced."""

    @property
    def size_bytes(self) -> int:
        return int(self.payload.nbytes)
