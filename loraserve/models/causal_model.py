"""A transformers model that computes packed, mixed-adapter batches over paged KV."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
from loraserve_adapters.packed import PackedTable
from loraserve_kernels.adapter_table import AdapterTable
from loraserve_kernels.backend import Backend
from loraserve_kernels.decoder_model import ModelOutput
from loraserve_kernels.linear import Linear
from loraserve_kernels.quantization import STORED, Quantization
from loraserve_kernels.step_batch import StepBatch
from torch import Tensor, nn
from transformers import PreTrainedModel

from loraserve.models import self_check
from loraserve.models.attention import AttentionLayer, attach_layer
from loraserve.models.bare_weights import BareWeightSpec, attach_bare_weight
from loraserve.models.base_description import describe_layout, lora_groups
from loraserve.models.context import Arrivals, ForwardContext, StateSpec
from loraserve.models.dora import DoraGroup, find_factors
from loraserve.models.embedding import EmbeddingAdapters, PackedEmbedding, rows_of
from loraserve.models.errors import ModelRefusedError
from loraserve.models.experts import ExpertsSpec, attach_experts
from loraserve.models.forward import Forward, TransformersForward, direct_forward
from loraserve.models.fused_attention import fuse_attention
from loraserve.models.fused_layer import fuse_layers
from loraserve.models.latent_attention import attach_latents
from loraserve.models.linears import kept_linear, replace_linears
from loraserve.models.mapped_weights import MappedWeights
from loraserve.models.module_swaps import swap_modules
from loraserve.models.quantized_weights import (
    parameters_of,
    quantization_coverage_note,
    quantizations_of,
    quantized_parameters,
    rounded_while_computing,
    saved_bytes,
    stored_parameters,
)
from loraserve.models.recurrent import attach_recurrence
from loraserve.models.rope import freeze_rope, tabulate_rope
from loraserve.models.stored_weights import StoredWeight, StoredWeights
from loraserve.models.structure import AttentionSpec, LinearsSpec, ModelStructure, record_structure
from loraserve.models.trained_tokens import TokenTable, subtract_base_rows


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The KV shape of one attention layer."""

    num_kv_heads: int
    head_dim: int
    num_caches: int = 2
    """One for keys and one for values, or one for latents, which are both."""

    @property
    def elements_per_token(self) -> int:
        return self.num_caches * self.num_kv_heads * self.head_dim


class CausalModel:
    """Built in two stages: `__init__` records the structure, `prepare` checks it and swaps modules.

    Between them the caller sizes its memory and decides max_model_len.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        backend: Backend,
        quantization: Quantization | None = None,
        stored: StoredWeights = MappingProxyType({}),
        available_bytes: int | None = None,
    ) -> None:
        """quantization: of the layers' weights. stored: weights that the model has placeholders for, which stay in four
        bits if they can. available_bytes: for those that cannot; None = enough. Raises `ModelRefusedError`."""
        self._model = model
        self._context = ForwardContext(backend)
        self._forward: Forward = TransformersForward(model)
        self._stored = stored_parameters(model, stored)
        """Stored parameters that are not packed yet."""
        with rounded_while_computing(self._stored.values(), backend):
            structure = record_structure(model)
        self._attention: list[AttentionSpec] = structure.attention
        self._recurrent = structure.recurrent
        self._context.state_specs = [state for spec in structure.recurrent for state in spec.states]
        quantizations = quantizations_of(model, structure, quantization, stored)
        self._dequantize_others(structure, quantizations, available_bytes)
        self.stored = {name: weight for name, weight in stored.items() if name in self._stored}
        """Weights that stay in the checkpoint's four-bit form."""
        self.has_other_linears = len(self.stored) < len(stored) or any(
            name not in self.stored and not (isinstance(spec, LinearsSpec) and spec.has_sampled_rows)
            for spec in structure.adaptable
            if isinstance(spec, LinearsSpec | ExpertsSpec)
            for name in parameters_of(spec)
        )
        """Whether any linear or expert weight is not in `stored`, `lm_head` aside."""
        self._adaptable = deque(zip(structure.adaptable, quantizations, strict=True))
        """Each with its quantization. `prepare` takes one out when it replaces the module, which frees its weights'
        memory."""
        self.layout = describe_layout(model, structure)
        self.lora_groups = lora_groups(self.layout)
        self._embedding_adapters = None
        if structure.embedding is not None:
            embed_scale = structure.embedding.embed_scale
            self._embedding_adapters = EmbeddingAdapters(self.lora_groups[0], embed_scale, self._context)
        self._dora_groups: list[DoraGroup] = []
        """All linears; filled by `prepare`."""
        self._token_tables: dict[int, TokenTable] = {}
        """Embedding and `lm_head`, if they can have adapters, by member; filled by `prepare`."""
        self._quantized_parameters = [*quantized_parameters(model, structure, quantizations, self._stored)]
        num_bytes = sum(parameter.nbytes for parameter in model.parameters())
        self.weight_bytes = num_bytes - saved_bytes(self._quantized_parameters)
        """Memory that the weights take after `prepare`."""
        self.num_weights = sum(parameter.numel() for parameter in model.parameters())
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ModelRefusedError(f"{type(model).__name__} cannot be served: it has no output linear (lm_head)")
        self.logits_size = head.out_features
        """Columns of the logits; the tokenizer may know fewer tokens."""
        self.notes: list[str] = []
        """For the operator: options and optimizations that could not be used, or only in part."""
        if quantization and (note := quantization_coverage_note(model, self._quantized_parameters, quantization)):
            self.notes.append(note)

    @property
    def dtype(self) -> torch.dtype:
        return self._model.dtype

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def kv_specs(self) -> list[KVSpec]:
        return [KVSpec(spec.num_kv_heads, spec.head_dim, 1 if spec.latent else 2) for spec in self._attention]

    @property
    def state_specs(self) -> list[StateSpec]:
        """Of recurrent layers; empty for a model without any."""
        return self._context.state_specs

    def prepare(self, max_model_len: int, vocab_size: int, progress: Callable[[int, int], None]) -> None:
        """Freeze RoPE, prove paged batches right, then prepack linears one group at a time and prove that too.

        Raises `ModelRefusedError`. vocab_size: columns of the logits that tokens are chosen from. progress: called with
        (groups of linears or experts done, their total).
        """
        model, attention, context = self._model, self._attention, self._context
        freeze_rope(model, max_model_len)
        self._attach_layers()
        first_state = 0
        for spec in self._recurrent:
            attach_recurrence(spec, first_state, context)
            first_state += len(spec.states)
        has_experts = any(isinstance(spec, ExpertsSpec) for spec, _ in self._adaptable)
        num_probes = self_check.NUM_PROBES_OF_EXPERTS if has_experts else 1
        with rounded_while_computing(self._quantized_parameters, context.backend):
            probes = self_check.make_probes(model, attention, max_model_len, num_probes)
            self_check.require_equal(model, attention, context, probes)
        self._quantized_parameters.clear()
        total = len(self._adaptable)
        groups = iter(self.lora_groups if self._embedding_adapters is None else self.lora_groups[1:])
        mapped = MappedWeights()
        for index in range(total):
            spec, quantization = self._adaptable.popleft()
            if isinstance(spec, ExpertsSpec):
                of_both, kept = (next(groups), next(groups)), self._take_stored(spec)
                attach_experts(model, spec, of_both, context, mapped, quantization=quantization, stored=kept)
            elif isinstance(spec, BareWeightSpec):
                attach_bare_weight(spec, next(groups), context)
            elif spec.is_absorbed:
                ((_, linear),) = spec.members
                self._dora_groups.append(kept_linear(linear, next(groups), context))
            else:
                of_all, kept = next(groups), self._take_stored(spec)
                group = replace_linears(model, spec, of_all, context, mapped, quantization=quantization, stored=kept)
                self._dora_groups.append(group)
                self._note_table(group)
            progress(index + 1, total)
        tabulate_rope(model, max_model_len, model.dtype)
        swap_modules(model, context.backend)
        self._require_equal(probes)
        self._keep_if_equal("fused attention", fuse_attention(model, attention), probes)
        self._keep_if_equal("fused layers", fuse_layers(model, len(attention)), probes)
        if self._embedding_adapters is not None:
            self._embedding_adapters.attach(model.get_input_embeddings())
            of_embedding = self.lora_groups[0]
            rows = partial(rows_of, model.get_input_embeddings())
            self._token_tables[of_embedding.member_start] = TokenTable(
                of_embedding, of_embedding.member_start, True, rows
            )
        self._choose_forward(probes[0], vocab_size)

    def _attach_layers(self) -> None:
        groups = {self.layout.groups[group.group_index][0].name: group for group in self.lora_groups}
        for index, spec in enumerate(self._attention):
            layer = AttentionLayer(index, self._context)
            if spec.latent is not None:
                layer.up = spec.latent.up_projection(spec.num_heads, groups[spec.latent.linear_name])
                attach_latents(spec.module, self._context)
            attach_layer(spec.module, layer)

    def _note_table(self, group: DoraGroup) -> None:
        """Record the token table of `lm_head`, if it is in the group."""
        lora_group, first_output = group.lora_group, 0
        for index, module in enumerate(self.layout.groups[lora_group.group_index]):
            if module.is_of_vocabulary:
                rows = partial(_rows_from, group.linear, first_output)
                member = lora_group.member_start + index
                self._token_tables[member] = TokenTable(lora_group, member, False, rows)
            first_output += module.out_features

    def _take_stored(self, spec: LinearsSpec | ExpertsSpec) -> list[StoredWeight]:
        """The stored weights of all that is computed together, or none."""
        parameters = [self._stored.pop(name) for name in parameters_of(spec) if name in self._stored]
        return [parameter.stored for parameter in parameters if parameter.stored is not None]

    def _dequantize_others(
        self, structure: ModelStructure, quantizations: Sequence[Quantization | None], available_bytes: int | None
    ) -> None:
        """Dequantize weights that cannot stay in four bits: routers', a dense layer's before `lm_head`, those computed
        together with weights in another form, and those that cannot have adapters."""
        kept: set[str] = set()
        for spec, quantization in zip(structure.adaptable, quantizations, strict=True):
            if quantization in STORED and isinstance(spec, LinearsSpec | ExpertsSpec):
                kept |= {*parameters_of(spec)}
        others = self._stored.keys() - kept
        if any(self._stored[name].quantization is Quantization.MXFP4 for name in others):
            raise ModelRefusedError(
                f"{type(self._model).__name__} cannot be served: some of its experts cannot be computed in MXFP4"
            )
        num_bytes = sum(self._stored[name].value.nbytes for name in others)
        if available_bytes is not None and num_bytes > available_bytes:
            raise ModelRefusedError(
                f"{num_bytes / 2**30:.1f} GiB of {type(self._model).__name__}'s weights cannot stay in four bits, but "
                f"only {available_bytes / 2**30:.1f} GiB of memory are free to dequantize them"
            )
        mapped = MappedWeights()
        for name in others:
            parameter = self._stored.pop(name)
            assert parameter.stored is not None
            parameter.value.data = parameter.stored.dequantize(self._model.dtype)
            parameter.stored.release_pages(mapped)

    def _require_equal(self, probes: list[self_check.Probe]) -> None:
        """As `self_check.require_equal`, but retries with the embedding unpacked: a model may read its table itself."""
        model, attention, context = self._model, self._attention, self._context
        try:
            self_check.require_equal(model, attention, context, probes)
        except ModelRefusedError:
            embedding = model.get_input_embeddings()
            if not isinstance(embedding, PackedEmbedding):
                raise
            model.set_input_embeddings(embedding.unpacked())
            self_check.require_equal(model, attention, context, probes)
            self.notes.append(
                "tied embedding: kept in memory twice, because the model reads more of it than tokens' rows"
            )

    def _keep_if_equal(self, what: str, originals: dict[str, nn.Module], probes: list[self_check.Probe]) -> None:
        if originals and not self_check.is_equal(self._model, self._attention, self._context, probes):
            for name, module in originals.items():
                self._model.set_submodule(name, module)
            self.notes.append(f"{what}: disabled, because its logits differ from the model's own; steps take longer")

    def _choose_forward(self, probe: self_check.Probe, vocab_size: int) -> None:
        direct = direct_forward(self._model, vocab_size, self._embedding_adapters)
        if direct is None:
            if self.device.type != "cpu" and not self.notes:
                self.notes.append(
                    "fused layers: disabled, because this model's layers are of an unsupported kind; steps take longer"
                )
        elif self_check.is_same(direct, self._model, self._attention, self._context, probe):
            self._forward = direct
        else:
            self.notes.append(
                "direct forward: disabled, because its logits are not bit-identical; steps take longer to launch"
            )

    def bind(
        self,
        k_caches: Sequence[Tensor],
        v_caches: Sequence[Tensor],
        table: AdapterTable | None,
        states: Sequence[Tensor] = (),
    ) -> None:
        """k_caches, v_caches: per attention layer [num_blocks, num_kv_heads, block_size, head_dim]; for latents one.

        states: of recurrent layers, per state [num_slots, *shape].
        """
        self._context.k_caches = list(k_caches)
        self._context.v_caches = list(v_caches)
        self._context.states = list(states)
        self._context.adapter_table = table

    def finish_adapter(self, table: PackedTable, values: Tensor) -> None:
        """Compute what depends on the base's weights, before a step reads the adapter: DoRA's factors, and the
        differences of trained rows. values: [num_elements], as packed; edited in place."""
        find_factors(self._dora_groups, table, values)
        subtract_base_rows(self._token_tables, table, values)

    def forward(self, batch: StepBatch, arrivals: Arrivals | None = None) -> ModelOutput:
        """The output is valid until the next forward; logits are in the model's dtype."""
        self._context.batch, self._context.arrivals = batch, arrivals
        output = self._forward(batch)
        self._context.batch = self._context.arrivals = None
        return output


def _rows_from(linear: Linear, first_output: int, token_ids: Tensor) -> Tensor:
    return linear.rows(token_ids + first_output)
