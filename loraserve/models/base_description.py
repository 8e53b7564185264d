"""What adapters need to know of a model: the modules that they may change, in the order in which they are packed."""

from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256

import torch
from loraserve_adapters.base_layout import BaseLayout, BaseModule
from loraserve_adapters.packed_file import layout_fingerprint
from loraserve_kernels.adapter_table import LoraGroup
from torch import Tensor, nn
from transformers import PreTrainedModel

from loraserve.models.bare_weights import BareWeightSpec
from loraserve.models.embedding import counts_as_tied, is_tied
from loraserve.models.experts import ExpertsSpec
from loraserve.models.structure import ModelStructure

_HASHED_ROWS = 4096


def describe_layout(model: PreTrainedModel, structure: ModelStructure) -> BaseLayout:
    groups = tuple(_describe_groups(model, structure))
    in_groups = {module.name for group in groups for module in group}
    dtype, head = str(model.dtype).removeprefix("torch."), model.get_output_embeddings()
    names = [(name, module) for name, module in model.named_modules() if name and name not in in_groups]
    return BaseLayout(
        fingerprint=layout_fingerprint(groups, dtype),
        dtype=dtype,
        groups=groups,
        other_modules=tuple(name for name, _ in names),
        embedding_modules=tuple(name for name, module in names if isinstance(module, nn.Embedding)),
        unreached_linears=tuple(structure.unreached_linears),
        hidden_size=None if head is None else head.weight.shape[1],
    )


def lora_groups(layout: BaseLayout) -> list[LoraGroup]:
    groups = []
    member_start = 0
    for index, members in enumerate(layout.groups):
        out_features = tuple(member.out_features for member in members)
        groups.append(LoraGroup(index, member_start, members[0].in_features, out_features))
        member_start += len(members)
    return groups


def _describe_groups(model: PreTrainedModel, structure: ModelStructure) -> Iterator[tuple[BaseModule, ...]]:
    """One group each for the embedding, linears that share an input, and a bare weight; two for a layer's experts."""
    head = model.get_output_embeddings()
    embedding, sha256_of_embedding = structure.embedding, None
    if embedding is not None:
        num_embeddings, hidden_size = embedding.weight.shape
        sha256_of_embedding = _sha256_of(embedding.weight)
        yield (BaseModule(embedding.name, num_embeddings, hidden_size, sha256_of_embedding, is_embedding=True),)
    for spec in structure.adaptable:
        if isinstance(spec, ExpertsSpec):
            for (name, weight), linears in zip(spec.weights, spec.linears, strict=True):
                num_experts, out_features, in_features = weight.shape
                yield (BaseModule(name, in_features, out_features, None, num_experts, linears),)
            continue
        if isinstance(spec, BareWeightSpec):
            out_features, in_features = spec.weight.shape
            yield (BaseModule(spec.name, in_features, out_features, num_matrices=1),)
            continue
        members = [
            BaseModule(name, linear.in_features, linear.out_features, is_absorbed=spec.is_absorbed)
            for name, linear in spec.members
        ]
        for index, (name, linear) in enumerate(spec.members):
            if linear is head:
                is_known = sha256_of_embedding is not None and is_tied(linear, model)
                weight_sha256 = sha256_of_embedding if is_known else _sha256_of(linear.weight)
                bias_sha256 = None if linear.bias is None else _sha256_of(linear.bias)
                counts = counts_as_tied(name, linear, model)
                members[index] = replace(
                    members[index], weight_sha256=weight_sha256, bias_sha256=bias_sha256, is_tied=counts
                )
        yield tuple(members)


def _sha256_of(tensor: Tensor) -> str:
    """Hashes piece by piece, so that a tensor on a GPU is never on the host as a whole."""
    digest = sha256()
    for piece in tensor.detach().split(_HASHED_ROWS):
        digest.update(piece.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
