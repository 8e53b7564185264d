"""Fused, prepacked linears with batched LoRA, in place of the model's own.

The linears of a group (q|k|v, gate|up) read the same input: the first one called computes all of them with one matrix
product and one LoRA call, the others return their columns.
"""

import torch
from loraserve_kernels.adapter_table import LoraGroup
from loraserve_kernels.prepacked_linear import PrepackedLinear
from torch import Tensor, nn

from loraserve.models.context import ForwardContext


class LinearGroup:
    """Computes [T, sum(out_features)] for its members, once for each input tensor."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, lora_group: LoraGroup, context: ForwardContext, sampled_rows: bool
    ) -> None:
        """weight: [sum(out_features), in_features]. sampled_rows: the input holds only the sampled rows (`lm_head`)."""
        self._linear = PrepackedLinear(weight, bias)
        self._lora_group = lora_group
        self._context = context
        self._sampled_rows = sampled_rows
        self._num_members = len(lora_group.out_features)
        self._input: Tensor | None = None
        self._output: Tensor | None = None
        self._num_pending = 0

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., in_features] → [..., sum(out_features)]."""
        if self._input is not x:
            self._output = self._compute(x)
            self._input = x
            self._num_pending = self._num_members
        output = self._output
        assert output is not None
        self._num_pending -= 1
        if self._num_pending == 0:
            self._input = self._output = None
        return output

    def _compute(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y = self._linear(rows)
        context = self._context
        if context.adapter_table is not None and rows.shape[0] > 0:
            batch = context.current_batch()
            segments = batch.sampled_segments if self._sampled_rows else batch.segments
            if segments.has_adapter:
                context.backend.lora_add(y, rows, self._lora_group, context.adapter_table, segments)
        return y.view(*x.shape[:-1], y.shape[-1])


class GroupMember(nn.Module):
    """Stands where one linear of a group stood."""

    def __init__(self, group: LinearGroup, start: int, end: int) -> None:
        super().__init__()
        self._group = group
        self._start = start
        self._end = end

    def forward(self, x: Tensor) -> Tensor:
        return self._group(x)[..., self._start : self._end]


def replace_linears(
    model: nn.Module, members: list[tuple[str, nn.Linear]], lora_group: LoraGroup, context: ForwardContext
) -> None:
    """Swap a group's linears for one `LinearGroup`; the originals' weights are freed unless tied elsewhere."""
    linears = [linear for _, linear in members]
    single = len(linears) == 1
    weight = linears[0].weight if single else torch.cat([linear.weight for linear in linears])
    bias = _joined_bias(linears)
    is_lm_head = single and linears[0] is model.get_output_embeddings()  # type: ignore[operator]
    group = LinearGroup(weight.detach(), bias, lora_group, context, sampled_rows=is_lm_head)
    start = 0
    for name, linear in members:
        end = start + linear.out_features
        parent_name, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent_name), child, GroupMember(group, start, end))
        start = end


def _joined_bias(linears: list[nn.Linear]) -> Tensor | None:
    if all(linear.bias is None for linear in linears):
        return None
    parts = [
        linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
        for linear in linears
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
