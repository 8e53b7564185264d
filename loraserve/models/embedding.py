"""Token embeddings: with adapters, and read from the packed weight of a tied `lm_head`, so that it is in memory only
once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from loraserve_kernels.adapter_table import LoraGroup
from loraserve_kernels.linear import Linear
from loraserve_kernels.step_batch import StepBatch
from torch import Tensor, nn
from transformers import PreTrainedModel

from loraserve.models.context import ForwardContext


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    name: str
    weight: Tensor
    """[num_embeddings, hidden_size]"""
    embed_scale: float
    """Factor that its rows are multiplied by (Gemma 3)."""


@contextmanager
def recorded_embedding(model: PreTrainedModel, token_ids: Tensor) -> Iterator[list[EmbeddingSpec]]:
    """Yields a list that afterwards has the model's embedding, if the block's forward pass of these tokens only calls
    it to look up their rows."""
    found: list[EmbeddingSpec] = []
    embedding = model.get_input_embeddings()
    name = next((name for name, module in model.named_modules() if module is embedding), None)
    if name is None or not isinstance(embedding, nn.Embedding) or embedding.max_norm is not None:
        yield found
        return
    weight = embedding.weight.detach()
    embed_scale = float(torch.as_tensor(getattr(embedding, "embed_scale", 1.0), dtype=weight.dtype))
    are_lookups: list[bool] = []

    def note(_embedding: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        is_of_tokens = bool(args) and torch.equal(args[0].flatten(), token_ids.flatten())
        are_lookups.append(is_of_tokens and torch.equal(output, weight[args[0]] * embed_scale))

    handle = embedding.register_forward_hook(note)
    try:
        yield found
    finally:
        handle.remove()
    if are_lookups and all(are_lookups):
        found.append(EmbeddingSpec(name, weight, embed_scale))


class EmbeddingAdapters:
    """Adds the adapters' LoRA to token embeddings, or looks tokens up in the adapters' own."""

    def __init__(self, group: LoraGroup, embed_scale: float, context: ForwardContext) -> None:
        """embed_scale: see `EmbeddingSpec`."""
        self._group = group
        self._embed_scale = embed_scale
        self._context = context

    def attach(self, embedding: nn.Module) -> None:
        embedding.register_forward_hook(self._add)

    def are_in(self, batch: StepBatch) -> bool:
        """Whether an adapter of the batch has LoRA on the embedding. For tensors on a CPU."""
        table, segments = self._context.adapter_table, batch.segments
        if table is None or not segments.has_adapter:
            return False
        # numpy, because each step with adapters calls this: 4 µs if no loaded one has any, else 10 (EPYC); torch 20.
        lora_rank = table.lora_rank.numpy()[:, self._group.member_start]
        if not lora_rank.any():
            return False
        adapter_slot = segments.adapter_slot.numpy()
        return bool(lora_rank[adapter_slot[adapter_slot >= 0]].any())

    def _add(self, _embedding: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
        context = self._context
        if context.adapter_table is None or args[0].numel() == 0:
            return
        segments = context.current_batch().segments
        if segments.has_adapter:
            context.await_adapters(self._group)
            rows, token_ids = y.view(-1, y.shape[-1]), args[0].view(-1)
            context.backend.lora_embed(rows, token_ids, self._embed_scale, self._group, context.adapter_table, segments)
            context.look_up_own_tables(rows, token_ids, self._embed_scale, self._group)


class PackedEmbedding(nn.Module):
    def __init__(self, linear: Linear, weight: Tensor) -> None:
        """weight: [num_embeddings, hidden_size], from which the linear was made; it is not kept."""
        super().__init__()
        self.linear = linear
        self.num_embeddings = weight.shape[0]
        # A model's dtype and device are those of its first parameter, and there may be no other one left.
        self.no_weight = nn.Parameter(weight.new_empty(0), requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """int64 [...] → [..., hidden_size]."""
        return self.linear.rows(token_ids)

    def unpacked(self) -> nn.Embedding:
        """The original table, in memory of its own."""
        ids = torch.arange(self.num_embeddings)
        return nn.Embedding.from_pretrained(self.linear.rows(ids), freeze=True)


def rows_of(embedding: nn.Module, token_ids: Tensor) -> Tensor:
    """The table's rows, without scale or adapters: int64 [n] → [n, hidden_size]."""
    if isinstance(embedding, PackedEmbedding):
        return embedding.linear.rows(token_ids)  # without what adapters add
    assert isinstance(embedding, nn.Embedding)
    return embedding.weight[token_ids]


def is_tied(linear: nn.Linear, model: PreTrainedModel) -> bool:
    return linear.weight is getattr(model.get_input_embeddings(), "weight", None)


def counts_as_tied(name: str, linear: nn.Linear, model: PreTrainedModel) -> bool:
    """Whether PEFT trains the `lm_head` of this name with the embedding.

    It also does if a checkpoint has two tables but its config says that they are tied; transformers keeps those two.
    """
    can_be = f"{name}.weight" in (getattr(model, "_tied_weights_keys", None) or ())
    return bool(model.config.to_dict().get("tie_word_embeddings")) and (can_be or is_tied(linear, model))


def is_table(embedding: nn.Module) -> bool:
    """Whether it is a plain table; some families scale the rows that they look up."""
    return type(embedding) is nn.Embedding and embedding.max_norm is None
