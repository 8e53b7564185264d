"""A model's structure, recorded in one forward pass: its embedding, attention layers, linears, routers and experts.

Names and classes differ between model families. These do not, and identify the parts: which modules call our attention
function, which linears receive the very same input tensor, and which modules use transformers' experts interface.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from loraserve.models.bare_weights import BareWeightSpec, recorded_bare_weights
from loraserve.models.embedding import EmbeddingSpec, recorded_embedding
from loraserve.models.errors import DEVICE_ERRORS, ModelRefusedError
from loraserve.models.experts import ExpertsSpec, can_compute, is_experts
from loraserve.models.forward_names import reads_weight_of, uses
from loraserve.models.latent_attention import LatentSpec, find_latent
from loraserve.models.recurrent import RecurrentSpec, reads_weights_in_training_only, recorded_recurrence

_RECORDER_NAME = "loraserve_recorder"
_NUM_TOKENS = 8
_SAMPLED = (3, 7)
"""Rows whose logits the recorded pass requests."""
_KNOWN_TENSORS = frozenset({"s_aux", "position_ids"})
"""Arguments of the attention interface that hold no mask: sinks and positions."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    """At most head_dim."""
    scaling: float
    sliding_window: int | None
    softcap: float | None
    sinks: Tensor | None
    """[num_heads], the model's own."""
    latent: LatentSpec | None = None
    """If not None, one cache holds the latents that keys and values are computed from, as of one head of its
    `head_dim`."""


@dataclass(frozen=True, slots=True)
class LinearsSpec:
    """Linears that share a parent and an input tensor."""

    members: list[tuple[str, nn.Linear]]
    """(name, linear), in call order."""
    has_sampled_rows: bool
    """They receive only the rows whose logits are requested (`lm_head`, and a dense layer before it)."""
    is_absorbed: bool = False
    """The up-projection of latent attention, which no step calls: it is applied to queries and outputs."""


@dataclass(slots=True)
class ModelStructure:
    attention: list[AttentionSpec] = field(default_factory=list)
    """In call order."""
    recurrent: list[RecurrentSpec] = field(default_factory=list)
    """In call order."""
    embedding: EmbeddingSpec | None = None
    """The token embedding; None if it is of a kind that cannot have adapters."""
    adaptable: list[LinearsSpec | BareWeightSpec | ExpertsSpec] = field(default_factory=list)
    """Everything else that can have adapters, in call order.

    Excludes linears whose parent may read their weight (HunYuan's routers read its dtype), and modules whose rows are
    not tokens: which adapter such a row is for would be unknown.
    """
    unreached_linears: list[str] = field(default_factory=list)
    """Names of linears that no text reaches, such as those of an image tower beside the decoder."""


def record_structure(model: PreTrainedModel) -> ModelStructure:
    """Run a few tokens through the model and record what is called. Raises `ModelRefusedError`."""
    structure = ModelStructure()
    num_chosen = getattr(model.config.get_text_config(), "index_topk", None)
    if num_chosen is not None:
        raise ModelRefusedError(
            f"{type(model).__name__} cannot be served: it chooses the keys that a token attends to with an indexer "
            f"(index_topk {num_chosen}), which is not supported"
        )
    try:
        positions = torch.arange(_NUM_TOKENS, device=model.device)[None]
        token_ids = positions % model.config.get_text_config().vocab_size
        sampled_rows = torch.tensor(_SAMPLED, device=model.device)
        with (
            _recorded_attention(model, structure),
            recorded_embedding(model, token_ids) as embedding,
            recorded_recurrence(model) as recurrent,
            _recorded_calls(model, structure),
            _called_modules(model) as called,
            torch.inference_mode(),
        ):
            model(input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=sampled_rows)
    except (ModelRefusedError, *DEVICE_ERRORS):
        raise
    except Exception as error:
        raise ModelRefusedError(
            f"{type(model).__name__} cannot be served: it does not run on transformers' attention interface ({error})"
        ) from error
    structure.recurrent = recurrent
    if not structure.attention and recurrent:
        raise ModelRefusedError(
            f"{type(model).__name__} cannot be served: all of its layers are recurrent; at least one must be attention"
        )
    if not structure.attention:
        raise ModelRefusedError(
            f"{type(model).__name__} cannot be served: none of its layers calls transformers' attention interface"
        )
    _require_known_masks(model, structure.attention)
    _find_latents(structure)
    for spec in structure.attention:
        if spec.latent is None and spec.value_dim > spec.head_dim:
            raise ModelRefusedError(
                f"{type(model).__name__} cannot be served: its keys have head_dim {spec.head_dim} and its values "
                f"{spec.value_dim}; values may not have more"
            )
    structure.embedding = next(iter(embedding), None)
    structure.unreached_linears = _unreached_linears(model, called)
    return structure


def _require_known_masks(model: PreTrainedModel, attention: list[AttentionSpec]) -> None:
    """Reject masks that only matter after thousands of tokens: no short probe would notice that they are missing."""
    name, config = type(model).__name__, model.config.get_text_config()
    layer_types: list[str] = getattr(config, "layer_types", None) or []
    if "chunked_attention" in layer_types:
        raise ModelRefusedError(
            f"{name} cannot be served: its chunked attention (attention_chunk_size {config.attention_chunk_size}) "
            "lives in a mask and never reaches the attention interface"
        )
    num_expected = layer_types.count("sliding_attention")
    num_windows = sum(spec.sliding_window is not None for spec in attention)
    if num_windows != num_expected and layer_types:
        raise ModelRefusedError(
            f"{name} cannot be served: {num_expected} of its layers have a sliding window, but {num_windows} pass it "
            "to the attention interface"
        )


@contextmanager
def _recorded_attention(model: PreTrainedModel, structure: ModelStructure) -> Iterator[None]:
    seen: set[int] = set()

    def record(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        _require_known_tensors(model, {"attention_mask": attention_mask, **kwargs})
        if id(module) not in seen:
            seen.add(id(module))
            structure.attention.append(_attention_spec(module, query, key, value, **kwargs))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register(_RECORDER_NAME, record)
    previous = model.config._attn_implementation or "eager"
    model.set_attn_implementation(_RECORDER_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(previous)
        AttentionInterface._global_mapping.pop(_RECORDER_NAME)


def _require_known_tensors(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    """Reject masks that layers build themselves; transformers builds none here. A probe cannot test them: a mask that
    keeps some thousands of tokens hides none of the probe's."""
    unknown = [name for name, value in arguments.items() if isinstance(value, Tensor) and name not in _KNOWN_TENSORS]
    if unknown:
        raise ModelRefusedError(
            f"{type(model).__name__} cannot be served: its layers pass masks or biases of their own "
            f"({', '.join(unknown)}) to transformers' attention interface, which is not supported"
        )


def _attention_spec(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> AttentionSpec:
    return AttentionSpec(
        module=module,
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=key.shape[3],
        value_dim=value.shape[3],
        scaling=query.shape[3] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )


def _find_latents(structure: ModelStructure) -> None:
    """Mark layers of latent attention, and their up-projections."""
    alone = {
        spec.members[0][1]: (index, spec)
        for index, spec in enumerate(structure.adaptable)
        if isinstance(spec, LinearsSpec) and len(spec.members) == 1
    }
    names = {linear: spec.members[0][0] for linear, (_, spec) in alone.items()}
    for index, spec in enumerate(structure.attention):
        has_options = spec.sliding_window or spec.softcap is not None or spec.sinks is not None
        latent = None if has_options else find_latent(spec.module, spec.num_heads, spec.value_dim, names)
        if latent is not None:
            structure.attention[index] = replace(spec, num_kv_heads=1, head_dim=latent.head_dim, latent=latent)
            place, linears = alone[latent.linear]
            structure.adaptable[place] = replace(linears, is_absorbed=True)


@contextmanager
def _recorded_calls(model: PreTrainedModel, structure: ModelStructure) -> Iterator[None]:
    """Record the calls of linears, bare weights and experts."""
    calls: list[tuple[str, nn.Module, Tensor]] = []  # holding the inputs keeps their identities unique

    def note(name: str, module: nn.Module, x: Tensor) -> None:
        if all(seen is not module for _, seen, _ in calls):
            calls.append((name, module, x))

    def linear_hook(name: str):
        return lambda module, args: note(name, module, args[0])

    def experts_hook(name: str):
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            spec = ExpertsSpec(name, module)
            if can_compute(spec, args, output):
                note(name, module, args[0])
            else:
                unsupported_experts.append(name)

        return hook

    unsupported_experts: list[str] = []
    handles = [
        module.register_forward_hook(experts_hook(name), prepend=True)  # before a hook swaps its weights back
        if is_experts(module)
        else module.register_forward_pre_hook(linear_hook(name))
        for name, module in model.named_modules()
        if is_experts(module) or _is_replaceable_linear(module, name, model)
    ]
    try:
        with recorded_bare_weights(model, lambda spec, x: note(spec.module_name, spec.module, x)) as excluded:
            yield
    finally:
        for handle in handles:
            handle.remove()
    previous: tuple[str, Tensor] | None = None
    for name, module, x in calls:
        num_rows = x.shape[:-1].numel()
        if num_rows not in (_NUM_TOKENS, len(_SAMPLED)):
            continue
        if not isinstance(module, nn.Linear):
            spec = ExpertsSpec(name, module) if is_experts(module) else BareWeightSpec(name, module)
            # We compute the experts of all layers or of none.
            if isinstance(spec, ExpertsSpec):
                is_excluded = bool(unsupported_experts)
            else:
                is_excluded = spec.name in excluded or spec.weight.dtype != model.dtype
            if num_rows == _NUM_TOKENS and not is_excluded:
                structure.adaptable.append(spec)
            continue
        parent = name.rpartition(".")[0]
        last = structure.adaptable[-1] if structure.adaptable else None
        if isinstance(last, LinearsSpec) and previous is not None and previous[0] == parent and previous[1] is x:
            last.members.append((name, module))
        else:
            structure.adaptable.append(LinearsSpec([(name, module)], num_rows == len(_SAMPLED)))
        previous = (parent, x)


def _is_replaceable_linear(module: nn.Module, name: str, model: PreTrainedModel) -> bool:
    parent, _, own_name = name.rpartition(".")
    holder = model.get_submodule(parent)
    may_be_read = reads_weight_of(holder, own_name) and not reads_weights_in_training_only(holder)
    return type(module) is nn.Linear and not may_be_read


@contextmanager
def _called_modules(model: PreTrainedModel) -> Iterator[set[str]]:
    """Yields a set to which the block adds the names of the modules it calls."""
    called: set[str] = set()

    def hook(name: str):
        return lambda *_: called.add(name)

    handles = [module.register_forward_pre_hook(hook(name)) for name, module in model.named_modules()]
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()


def _unreached_linears(model: PreTrainedModel, called: set[str]) -> list[str]:
    """Linears outside the decoder that were not called, nor was any module that contains them but not the decoder.

    Linears within the decoder all count as reached: the few tokens of a recorded pass do not reach every expert.
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    decoder_name = next((name for name, module in model.named_modules() if module is decoder), "")
    holders_of_both = set(_holders(decoder_name))

    def is_reached(name: str) -> bool:
        holders = _holders(name)
        may_be_read = holders[0] in holders_of_both and uses(model.get_submodule(holders[0]), "weight")
        return decoder_name in holders or may_be_read or bool(called.intersection({name, *holders} - holders_of_both))

    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    return [name for name in linears if not is_reached(name)]


def _holders(name: str) -> list[str]:
    """ "a.b.c" → "a.b", "a", ""."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, -1, -1)]
