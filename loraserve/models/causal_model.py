"""A transformers model that computes packed, mixed-adapter batches over paged KV."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

import torch
from loraserve_adapters.base_layout import BaseLayout, BaseModule
from loraserve_adapters.packed_file import layout_fingerprint
from loraserve_kernels.adapter_table import AdapterTable, LoraGroup
from loraserve_kernels.backend import Backend
from loraserve_kernels.decoder_model import ModelOutput
from loraserve_kernels.step_batch import StepBatch
from torch import Tensor, nn
from transformers import PreTrainedModel

from loraserve.models import self_check
from loraserve.models.context import Arrivals, ForwardContext
from loraserve.models.embedding import PackedEmbedding
from loraserve.models.errors import ModelRefusedError
from loraserve.models.forward import Forward, TransformersForward, direct_forward
from loraserve.models.fused_attention import fuse_attention
from loraserve.models.fused_layer import fuse_layers
from loraserve.models.linears import replace_linears
from loraserve.models.mapped_weights import MappedWeights
from loraserve.models.module_swaps import swap_modules
from loraserve.models.rope import freeze_rope, tabulate_rope
from loraserve.models.structure import AttentionSpec, ModelStructure, record_structure


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Of one attention layer."""

    num_kv_heads: int
    head_dim: int


class CausalModel:
    """Built in two stages: `__init__` records the structure, `prepare` checks it and swaps modules.

    Between them the caller sizes its memory and decides max_model_len.
    """

    def __init__(self, model: PreTrainedModel, backend: Backend) -> None:
        """Raises `ModelRefusedError`."""
        self._model = model
        self._context = ForwardContext(backend)
        self._forward: Forward = TransformersForward(model)
        structure = record_structure(model)
        self._attention: list[AttentionSpec] = structure.attention
        self._linear_groups = structure.linear_groups
        self._has_sampled_rows = structure.has_sampled_rows
        self.layout = _describe_layout(model, structure)
        self.lora_groups = _lora_groups(self._linear_groups)
        self.weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ModelRefusedError(f"{type(model).__name__} cannot be served: it has no output linear (lm_head)")
        self.logits_size = head.out_features
        """Columns of the logits; the tokenizer may know fewer tokens."""
        self.notes: list[str] = []
        """What `prepare` could not use, for the person who started the server."""

    @property
    def dtype(self) -> torch.dtype:
        return self._model.dtype

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def kv_specs(self) -> list[KVSpec]:
        return [KVSpec(spec.num_kv_heads, spec.head_dim) for spec in self._attention]

    def prepare(self, max_model_len: int, vocab_size: int, progress: Callable[[int, int], None]) -> None:
        """Freeze RoPE, prove paged batches right, then prepack linears one group at a time and prove that too.

        Raises `ModelRefusedError`. vocab_size: columns of the logits that tokens are chosen from. progress is called
        with (linear groups done, in all).
        """
        model, attention, context = self._model, self._attention, self._context
        freeze_rope(model, max_model_len)
        self_check.attach_layers(attention, context)
        probe = self_check.make_probe(model, attention, max_model_len)
        self_check.require_equal(model, attention, context, probe)
        total = len(self._linear_groups)
        mapped = MappedWeights()
        for index, lora_group in enumerate(self.lora_groups):
            group = self._linear_groups[index]
            replace_linears(model, group, lora_group, context, mapped, sampled_rows=self._has_sampled_rows[index])
            self._linear_groups[index] = []
            progress(index + 1, total)
        tabulate_rope(model, max_model_len, model.dtype)
        swap_modules(model, context.backend)
        self._require_equal(probe)
        self._keep_if_equal("fused attention", fuse_attention(model, attention), probe)
        self._keep_if_equal("fused layers", fuse_layers(model, len(attention)), probe)
        self._choose_forward(probe, vocab_size)

    def _require_equal(self, probe: self_check.Probe) -> None:
        """Also of a model that reads the table of its embeddings itself, once it has one again."""
        model, attention, context = self._model, self._attention, self._context
        try:
            self_check.require_equal(model, attention, context, probe)
        except ModelRefusedError:
            embedding = model.get_input_embeddings()
            if not isinstance(embedding, PackedEmbedding):
                raise
            model.set_input_embeddings(embedding.unpacked())
            self_check.require_equal(model, attention, context, probe)
            self.notes.append("tied embedding: in memory twice, as the model reads more of it than rows of tokens")

    def _keep_if_equal(self, what: str, originals: dict[str, nn.Module], probe: self_check.Probe) -> None:
        if originals and not self_check.is_equal(self._model, self._attention, self._context, probe):
            for name, module in originals.items():
                self._model.set_submodule(name, module)
            self.notes.append(f"{what}: not used, as logits differ from the model's own with it; steps take longer")

    def _choose_forward(self, probe: self_check.Probe, vocab_size: int) -> None:
        direct = direct_forward(self._model, vocab_size)
        if direct is None:
            if self.device.type != "cpu" and not self.notes:
                self.notes.append("fused layers: not used, as this model's are of another kind; steps take longer")
        elif self_check.is_same(direct, self._model, self._attention, self._context, probe):
            self._forward = direct
        else:
            self.notes.append("direct forward: not used, as its logits have other bits; steps take longer to launch")

    def bind(self, k_caches: Sequence[Tensor], v_caches: Sequence[Tensor], table: AdapterTable | None) -> None:
        """k_caches, v_caches: per attention layer [num_blocks, num_kv_heads, block_size, head_dim]."""
        self._context.k_caches = list(k_caches)
        self._context.v_caches = list(v_caches)
        self._context.adapter_table = table

    def forward(self, batch: StepBatch, arrivals: Arrivals | None = None) -> ModelOutput:
        """Valid until the next forward; logits in the model's dtype."""
        self._context.batch, self._context.arrivals = batch, arrivals
        output = self._forward(batch)
        self._context.batch = self._context.arrivals = None
        return output


def _lora_groups(linear_groups: Sequence[Sequence[tuple[str, nn.Linear]]]) -> list[LoraGroup]:
    groups = []
    member_start = 0
    for index, members in enumerate(linear_groups):
        out_features = tuple(linear.out_features for _, linear in members)
        groups.append(LoraGroup(index, member_start, members[0][1].in_features, out_features))
        member_start += len(members)
    return groups


def _describe_layout(model: PreTrainedModel, structure: ModelStructure) -> BaseLayout:
    head = model.get_output_embeddings()
    groups = tuple(
        tuple(
            BaseModule(
                name,
                linear.in_features,
                linear.out_features,
                weight_sha256=_weight_sha256(linear.weight) if linear is head else None,
            )
            for name, linear in members
        )
        for members in structure.linear_groups
    )
    in_groups = {module.name for group in groups for module in group}
    dtype = str(model.dtype).removeprefix("torch.")
    names = [(name, module) for name, module in model.named_modules() if name and name not in in_groups]
    return BaseLayout(
        fingerprint=layout_fingerprint(groups, dtype),
        dtype=dtype,
        groups=groups,
        other_modules=tuple(name for name, _ in names),
        embedding_modules=tuple(name for name, module in names if isinstance(module, nn.Embedding)),
        unreached_linears=tuple(structure.unreached_linears),
    )


def _weight_sha256(weight: Tensor) -> str:
    return sha256(weight.detach().cpu().contiguous().view(torch.uint8).numpy().data).hexdigest()
