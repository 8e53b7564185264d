"""y += embed_scale * scaling * A[:, token] B for the adapter of each row: LoRA on an embedding."""

import torch
from torch import Tensor

from loraserve_kernels.adapter_table import AdapterTable, LoraGroup
from loraserve_kernels.checks import mismatch, require_dense, require_like, require_rows
from loraserve_kernels.lora_add import lora_expand_reference, matrix
from loraserve_kernels.step_batch import Segments


def check_lora_embed(y: Tensor, token_ids: Tensor, group: LoraGroup, table: AdapterTable) -> None:
    """Raise `ValueError` unless shapes, dtypes and devices are those of `Backend.lora_embed`."""
    (out_features,) = group.out_features
    require_rows("y", y, out_features)
    require_like("y", y, "the adapters", table.arena)
    require_dense("token_ids", token_ids, torch.int64)
    if token_ids.shape != y.shape[:1]:
        raise mismatch("token_ids", list(token_ids.shape), f"[{y.shape[0]}], as y")
    if token_ids.device != y.device:
        raise mismatch("token_ids.device", token_ids.device, f"{y.device}, as y")


def lora_embed_reference(
    y: Tensor, token_ids: Tensor, embed_scale: float, group: LoraGroup, table: AdapterTable, segments: Segments
) -> None:
    """`Backend.lora_embed` in plain torch, one segment after the other."""
    starts, slots = segments.start.tolist(), segments.adapter_slot.tolist()
    member = group.member_start
    for slot, first, end in zip(slots, starts[:-1], starts[1:], strict=True):
        lora_rank = int(table.lora_rank[slot, member]) if slot >= 0 else 0
        if lora_rank == 0 or first == end:
            continue
        a = matrix(table, int(table.offset_a[slot, group.group_index]), lora_rank, group.in_features)
        b = matrix(table, int(table.offset_b[slot, member]), lora_rank, y.shape[1])
        hidden = a[:, token_ids[first:end]].T.float()
        rows = y[first:end]
        rows.copy_(rows.float() + lora_expand_reference(hidden, b, embed_scale * float(table.scaling[slot, member])))
