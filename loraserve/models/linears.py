"""Fused, prepacked linears with batched LoRA, in place of the model's own.

The linears of a group (q|k|v, gate|up) read the same input: the first one called computes all of them with one matrix
product and one LoRA call, the others return their columns.
"""

from collections.abc import Sequence
from functools import partial

import torch
from loraserve_kernels.adapter_table import LoraGroup
from loraserve_kernels.backend import Backend
from loraserve_kernels.four_bit_weight import joined
from loraserve_kernels.linear import Linear
from loraserve_kernels.quantization import Quantization
from torch import Tensor, nn
from transformers import PreTrainedModel

from loraserve.models.context import ForwardContext
from loraserve.models.dora import DoraGroup, squared_norms
from loraserve.models.embedding import PackedEmbedding, is_table, is_tied
from loraserve.models.mapped_weights import MappedWeights
from loraserve.models.stored_weights import StoredWeight, rounded_as_packed
from loraserve.models.structure import LinearsSpec


class LinearGroup:
    """Computes [T, sum(out_features)] for its members, once for each input tensor."""

    def __init__(self, linear: Linear, lora_group: LoraGroup, context: ForwardContext, sampled_rows: bool) -> None:
        """sampled_rows: the input holds only the sampled rows."""
        self.linear = linear
        self.lora_group = lora_group
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
        y = self.linear(rows)
        self._context.add_adapters(y, rows, self.lora_group, sampled_rows=self._sampled_rows)
        return y.view(*x.shape[:-1], y.shape[-1])


class GroupMember(nn.Module):
    """Takes the place of one linear of a group."""

    def __init__(self, group: LinearGroup, start: int, end: int) -> None:
        super().__init__()
        self.group = group
        self.start = start
        self.end = end

    def forward(self, x: Tensor) -> Tensor:
        return self.group(x)[..., self.start : self.end]


def replace_linears(
    model: PreTrainedModel,
    spec: LinearsSpec,
    lora_group: LoraGroup,
    context: ForwardContext,
    mapped: MappedWeights,
    *,
    quantization: Quantization | None,
    stored: Sequence[StoredWeight] = (),
) -> DoraGroup:
    """Swap a group's linears for one `LinearGroup`; returns the group as DoRA needs it.

    The weights' memory is given back as early as possible.

    quantization: see `Backend.linear`; an embedding that shares the weight is rounded with it. stored: the linears'
    weights from the checkpoint, if all of them stay in its four-bit form.
    """
    linears = [linear for _, linear in spec.members]
    bias = _joined_bias(linears)
    if stored:
        packed, norms = _pack_stored(linears, bias, context.backend, mapped, stored)
    else:
        packed, norms = _pack(model, linears, bias, context.backend, mapped, quantization)
    group = LinearGroup(packed, lora_group, context, spec.has_sampled_rows)
    start = 0
    for name, linear in spec.members:
        end = start + linear.out_features
        model.set_submodule(name, GroupMember(group, start, end))
        start = end
    return DoraGroup(packed, bias, norms, lora_group)


def kept_linear(linear: nn.Linear, lora_group: LoraGroup, context: ForwardContext) -> DoraGroup:
    """A linear that stays as it is, because its weight is read in another way than by rows; it has no bias."""
    weight = linear.weight.detach()
    return DoraGroup(
        context.backend.linear(weight, None, keep_weight=True), None, squared_norms(weight, None), lora_group
    )


def _pack(
    model: PreTrainedModel,
    linears: list[nn.Linear],
    bias: Tensor | None,
    backend: Backend,
    mapped: MappedWeights,
    quantization: Quantization | None,
) -> tuple[Linear, Tensor]:
    """The linears as one, and the `squared_norms` of its weight."""
    weights = [linear.weight.detach() for linear in linears]
    rounded = None if quantization is None else partial(backend.rounded_weight, quantization=quantization)
    norms = torch.cat([squared_norms(weight, rounded) for weight in weights])
    if len(linears) > 1:
        whole = torch.cat(weights)
        for linear in linears:
            mapped.release_pages(linear.weight)
            linear.weight = nn.Parameter(whole.new_empty(0), requires_grad=False)
        weights.clear()
        return backend.linear(whole, bias, keep_weight=False, quantization=quantization), norms
    shares_weight, embedding = is_tied(linears[0], model), model.get_input_embeddings()
    can_pack = is_table(embedding) and backend.packs(weights[0].dtype)
    keep_weight = shares_weight and not can_pack and quantization is None
    packed = backend.linear(weights[0], bias, keep_weight=keep_weight, quantization=quantization)
    if shares_weight and can_pack:
        model.set_input_embeddings(PackedEmbedding(packed, weights[0]))
    elif shares_weight and rounded is not None:
        embedding.weight = nn.Parameter(rounded(weights[0]), requires_grad=False)
    if not keep_weight:
        mapped.release_pages(weights[0])
    return packed, norms


def _pack_stored(
    linears: list[nn.Linear],
    bias: Tensor | None,
    backend: Backend,
    mapped: MappedWeights,
    stored: Sequence[StoredWeight],
) -> tuple[Linear, Tensor]:
    """Like `_pack`, for weights that stay in four bits."""
    norms = [
        squared_norms(rounded_as_packed(weight, linear.weight.detach(), backend), None)
        for linear, weight in zip(linears, stored, strict=True)
    ]
    four_bits = joined([part for weight in stored for part in weight.four_bits()])
    packed = backend.four_bit_linear(four_bits, bias, linears[0].weight.dtype)
    for weight in stored:
        weight.release_pages(mapped)
    return packed, torch.cat(norms)


def _joined_bias(linears: list[nn.Linear]) -> Tensor | None:
    if all(linear.bias is None for linear in linears):
        return None
    parts = [
        linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
        for linear in linears
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
