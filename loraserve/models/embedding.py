"""Embeddings of tokens read from the packed weight of an `lm_head` they are tied to, so that it is in memory once."""

import torch
from loraserve_kernels.backend import Backend
from loraserve_kernels.linear import PacksRows
from torch import Tensor, nn
from transformers import PreTrainedModel


class PackedEmbedding(nn.Module):
    def __init__(self, linear: PacksRows, weight: Tensor) -> None:
        """weight: [num_embeddings, hidden_size], which the linear was made of; it is not kept."""
        super().__init__()
        self.linear = linear
        self.num_embeddings = weight.shape[0]
        # A model's dtype and device are those of its first parameter, and there may be no other one left.
        self.no_weight = nn.Parameter(weight.new_empty(0), requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """int64 [...] → [..., hidden_size]."""
        return self.linear.rows(token_ids)

    def unpacked(self) -> nn.Embedding:
        """The table as it was, in memory of its own."""
        ids = torch.arange(self.num_embeddings)
        return nn.Embedding.from_pretrained(self.linear.rows(ids), freeze=True)


def is_tied(linear: nn.Linear, model: PreTrainedModel) -> bool:
    return linear.weight is getattr(model.get_input_embeddings(), "weight", None)


def can_pack(embedding: nn.Module, backend: Backend) -> bool:
    """Whether it is a table and nothing more; some families scale what they look up."""
    return type(embedding) is nn.Embedding and embedding.max_norm is None and backend.packs(embedding.weight.dtype)
