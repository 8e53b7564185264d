"""An adapter's trained rows of the embedding or `lm_head`, converted into differences from the base model's rows.

Rows are packed as they were trained; the base's are subtracted once, when the adapter is in the arena. From then on
they are LoRA: one matrix is one-hot and selects the token, the other holds the differences.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from loraserve_adapters.packed import PackedTable, PackedTokens
from loraserve_kernels.adapter_table import LoraGroup
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The embedding or `lm_head`."""

    group: LoraGroup
    member: int
    """Its index among the members of all groups."""
    is_embedding: bool
    rows: Callable[[Tensor], Tensor]
    """The rows that the base computes with: token ids, int64 [n] → [n, hidden_size]."""


def subtract_base_rows(tables: Mapping[int, TokenTable], packed: PackedTable, values: Tensor) -> None:
    """Subtract the base's rows, in place. tables: by member. values: [num_elements], a packed adapter."""
    with torch.inference_mode():
        for tokens in packed.trained_tokens:
            _subtract_rows(tables[tokens.member], tokens, packed, values)


def _subtract_rows(table: TokenTable, tokens: PackedTokens, packed: PackedTable, values: Tensor) -> None:
    group, first, num_tokens = table.group, table.group.member_start, len(tokens.token_ids)
    if table.is_embedding:
        start, hidden_size = int(packed.offset_b[table.member]), group.out_features[table.member - first]
    else:
        start, hidden_size = int(packed.offset_a[group.group_index]), group.in_features
        start += int(packed.lora_rank[first : table.member].sum()) * hidden_size
    own = values[start : start + num_tokens * hidden_size].view(num_tokens, hidden_size)
    token_ids = torch.tensor(tokens.token_ids)
    if values.is_cuda:  # from memory that is not page-locked, a copy waits for the steps that are queued
        token_ids = token_ids.pin_memory().to(values.device, non_blocking=True)
    base = table.rows(token_ids)
    own.copy_(own.float() - base.float())
