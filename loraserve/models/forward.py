"""Two ways through a prepared model: as transformers calls its modules, and straight from one fused layer to the next.

In a decode step of 16 rows and 12 layers (2 EPYC cores) transformers' own Python between the layers took 0.5 ms of 7.
Calls from Python around the layers, if the model is not one op as a whole, take another 0.3 ms of 9 (2 Xeon cores).
"""

from collections.abc import Callable, Sequence

import torch
from loraserve_kernels.decoder_layer import Norm
from loraserve_kernels.decoder_model import DecoderModel, DecoderModelParts, ModelOutput
from loraserve_kernels.step_batch import StepBatch
from torch import Tensor, nn
from transformers import PreTrainedModel

from loraserve.models.embedding import EmbeddingAdapters, PackedEmbedding
from loraserve.models.fused_layer import FusedDecoderLayer, FusedLayers
from loraserve.models.linears import GroupMember
from loraserve.models.module_swaps import FusedRmsNorm
from loraserve.models.rope import RotaryTable

Forward = Callable[[StepBatch], ModelOutput]
"""Computes a batch, which the model's context must hold. The output is valid until the next call."""

_MODEL_CHILDREN = {"embed_tokens", "layers", "norm", "rotary_emb"}


class TransformersForward:
    """`Forward` for any model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @torch.inference_mode()
    def __call__(self, batch: StepBatch) -> ModelOutput:
        if batch.pooled_rows is None:
            return ModelOutput(self._logits(batch))
        hidden: list[Tensor] = []  # each [T, hidden_size]; the last is from the model without its head
        # OPT's causal model does not call its base model but the decoder in it, which returns the same.
        modules = {self._model.base_model, self._model.get_decoder()} - {self._model}
        hooks = [
            module.register_forward_hook(lambda _module, _args, output: hidden.append(output[0][0]))
            for module in modules
        ]
        try:
            logits = self._logits(batch)
        finally:
            for hook in hooks:
                hook.remove()
        return ModelOutput(logits, hidden=hidden[-1].index_select(0, batch.pooled_rows))

    def _logits(self, batch: StepBatch) -> Tensor:
        output = self._model(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.sampled_rows,
        )
        return output.logits[0]


class DirectForward:
    """`Forward` for embedding → fused layers → norm → lm_head; the last two see only the sampled rows.

    One backend op, if it has one for the model; step by step for batches that this op does not take. (For the one op
    alone, inference mode would cost more than it saves: 40 µs in a decode step.)
    """

    def __init__(
        self,
        embedding: nn.Module,
        rotary: nn.Module,
        layers: Sequence[FusedDecoderLayer],
        norm: FusedRmsNorm,
        head: GroupMember,
        vocab_size: int,
        embedding_adapters: EmbeddingAdapters | None,
    ) -> None:
        self._embedding = embedding
        self._embedding_adapters = embedding_adapters
        self._rotary = rotary
        self._layers = FusedLayers(layers)
        self._norm = norm
        self._head = head
        self._context = layers[0].attention.context
        self._op = _one_op(embedding, rotary, layers, norm, head, vocab_size)

    def __call__(self, batch: StepBatch) -> ModelOutput:
        context = self._context
        if self._op is not None and context.arrivals is None and self._takes(batch):
            found = self._op(context.k_caches, context.v_caches, batch, context.adapter_table)
            if found is not None:
                return found
        return self._in_steps(batch)

    def _takes(self, batch: StepBatch) -> bool:
        """Whether the one op can: it supports no adapters on the embedding or own tables, and returns no hidden
        states."""
        adapters = self._embedding_adapters
        return not batch.needs_modules and (adapters is None or not adapters.are_in(batch))

    @torch.inference_mode()
    def _in_steps(self, batch: StepBatch) -> ModelOutput:
        rows = self._embedding(batch.token_ids)
        rotary = self._rotary(rows, batch.positions[None])
        rows = self._layers.compute(rows, rotary)
        hidden = None
        if batch.pooled_rows is not None:
            hidden = self._norm.compute(rows.index_select(0, batch.pooled_rows))
        if len(batch.sampled_rows) < len(rows):
            rows = rows.index_select(0, batch.sampled_rows)
        return ModelOutput(self._head(self._norm.compute(rows)), hidden=hidden)


def _one_op(
    embedding: nn.Module,
    rotary: nn.Module,
    layers: Sequence[FusedDecoderLayer],
    norm: FusedRmsNorm,
    head: GroupMember,
    vocab_size: int,
) -> DecoderModel | None:
    """The whole model as one op, if the backend has that and the modules have no other parts."""
    is_tied = isinstance(embedding, PackedEmbedding) and embedding.linear is head.group.linear
    if not (is_tied or type(embedding) is nn.Embedding) or not isinstance(rotary, RotaryTable):
        return None
    if any(layer.attention.index != index or not layer.has_rotary for index, layer in enumerate(layers)):
        return None
    parts = DecoderModelParts(
        embedding=None if is_tied else embedding.get_parameter("weight").detach(),
        cos=rotary.cos,
        sin=rotary.sin,
        layers=[layer.op for layer in layers],
        norm=Norm(norm.weight, norm.eps),
        head=head.group.linear,
        head_group=head.group.lora_group,
        vocab_size=vocab_size,
    )
    return layers[0].attention.context.backend.decoder_model(parts)


def direct_forward(
    model: PreTrainedModel, vocab_size: int, embedding_adapters: EmbeddingAdapters | None = None
) -> DirectForward | None:
    """None if the model has modules other than those that `DirectForward` computes.

    vocab_size: columns of the logits that a token can be chosen from. embedding_adapters: those on the embedding.

    Computation outside of modules, such as a factor on the logits, goes unnoticed here: the caller compares outputs.
    """
    head = model.get_output_embeddings()
    base = dict(model.named_children()).get(model.base_model_prefix)
    if base is None or set(model.children()) != {base, head} or not isinstance(head, GroupMember):
        return None
    children = dict(base.named_children())
    layers, norm = children.get("layers"), children.get("norm")
    if children.keys() != _MODEL_CHILDREN:
        return None
    if not isinstance(layers, nn.ModuleList) or not isinstance(norm, FusedRmsNorm):
        return None
    fused = [layer for layer in layers if isinstance(layer, FusedDecoderLayer)]
    if len(fused) != len(layers):
        return None
    embedding, rotary = children["embed_tokens"], children["rotary_emb"]
    return DirectForward(embedding, rotary, fused, norm, head, vocab_size, embedding_adapters)
