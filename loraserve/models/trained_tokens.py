"""Tokens whose rows of the embedding or `lm_head` are an adapter's own, as what has to be added to the base model's.

They are packed as they were trained; the base's rows are taken away once, when the adapter is in the arena. From then
on they are LoRA: a one-hot matrix tells the tokens apart, and the differences are the other one.
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
    """Of all groups'."""
    is_embedding: bool
    rows: Callable[[Tensor], Tensor]
    """What the base computes with: token ids, int64 [n] → [n, hidden_size]."""


def take_base_rows_away(tables: Mapping[int, TokenTable], packed: PackedTable, values: Tensor) -> None:
    """In place. tables: by member. values: [num_elements], an adapter as it is packed."""
    with torch.inference_mode():
        for tokens in packed.trained_tokens:
            _take_away(tables[tokens.member], tokens, packed, values)


def _take_away(table: TokenTable, tokens: PackedTokens, packed: PackedTable, values: Tensor) -> None:
    group, first, num_tokens = table.group, table.group.member_start, len(tokens.token_ids)
    if table.is_embedding:
        start, hidden_size = int(packed.offset_b[table.member]), group.out_features[table.member - first]
    else:
        start, hidden_size = int(packed.offset_a[group.group_index]), group.in_features
        start += int(packed.lora_rank[first : table.member].sum()) * hidden_size
    own = values[start : start + num_tokens * hidden_size].view(num_tokens, hidden_size)
    base = table.rows(torch.tensor(tokens.token_ids, device=values.device))
    own.copy_(own.float() - base.float())
