"""y += scaling * bias for rows of adapters whose B has a bias. Rare, so plain torch; on GPUs `lora_expand` adds it."""

from torch import Tensor

from loraserve_kernels.adapter_table import AdapterTable, LoraGroup
from loraserve_kernels.checks import mismatch, require_like, require_rows
from loraserve_kernels.step_batch import Segments


def lora_bias_add(y: Tensor, group: LoraGroup, table: AdapterTable, segments: Segments) -> None:
    """y: [T, sum(out_features)], changed in place; rows without an adapter or a bias do not change.

    Added in float32. Call it only if `table.num_biased` is not 0: it reads the table on the host.
    """
    require_rows("y", y, sum(group.out_features))
    require_like("y", y, "the adapters", table.arena)
    starts, slots = segments.start.tolist(), segments.adapter_slot.tolist()
    first_member = group.member_start
    for slot, first, end in zip(slots, starts[:-1], starts[1:], strict=True):
        if slot < 0 or first == end:
            continue
        column = 0
        for member, out_features in enumerate(group.out_features, start=first_member):
            offset = int(table.offset_bias[slot, member])
            if offset >= 0:
                if offset > table.arena.numel() - out_features:
                    raise mismatch("bias offset", offset, f"{out_features} elements within the arena")
                bias = table.arena[offset : offset + out_features].float() * table.scaling[slot, member]
                rows = y[first:end, column : column + out_features]
                rows.copy_(rows.float() + bias)
            column += out_features
