"""Where each loaded adapter's matrices are in the arena. Ops take this table, never a Python list of adapters."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

MAX_LORA_RANK = 512
"""Maximum for any member of an adapter: the GPU kernels' buffers hold no more. Checked when adapters are loaded."""


@dataclass(slots=True)
class AdapterTable:
    """G groups and M members (see `LoraGroup`) for up to `num_slots` adapters; rows change only between steps.

    Offsets count elements from the start of `arena`. A group's A matrices are adjacent, in member order, as one
    `[sum of member ranks, in_features]` matrix; a member's B is stored as `[rank, out_features]`. An absent member has
    rank 0 and undefined offsets.
    """

    arena: Tensor
    """[num_elements] in the model's dtype: all adapters' matrices."""
    offset_a: Tensor
    """int64 [num_slots, G]."""
    offset_b: Tensor
    """int64 [num_slots, M]."""
    lora_rank: Tensor
    """int32 [num_slots, M]."""
    scaling: Tensor
    """float32 [num_slots, M]: lora_alpha / rank, or / sqrt(rank) for rsLoRA."""
    offset_bias: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.int64))
    """int64 [num_slots, M]: offset of a member's bias `[out_features]`; -1 = none. Empty if no adapter can have one."""
    num_biased: int = 0
    """Number of adapters with biases in the arena; 0 = `lora_bias_add` has nothing to do."""
    offset_magnitude: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.int64))
    """int64 [num_slots, M]: offset of a member's DoRA vectors: factors, then shifts, per output column, float32
    `[2, out_features]` whatever the arena's dtype. In elements of the arena like all offsets, at a multiple of 4 bytes;
    -1 = none. Empty if no adapter can have them."""
    own_tables: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    """By adapter slot and member: views of the arena, `[num_rows, hidden_size]`, that replace the weight of the
    embedding or `lm_head`. Ops do not read them."""
    offset_alignment: int = 1
    """Every defined offset is a multiple of this many elements; from 16 bytes on, GPUs load 16-byte words."""


@dataclass(frozen=True, slots=True)
class LoraGroup:
    """Linears that read the same input and write adjacent columns of one output, such as q|k|v or gate|up."""

    group_index: int
    """Column of `AdapterTable.offset_a`."""
    member_start: int
    """Column of the first member in `AdapterTable.offset_b`, `lora_rank` and `scaling`."""
    in_features: int
    out_features: tuple[int, ...]
    """Output columns of each member; member m starts at column sum(out_features[:m])."""
