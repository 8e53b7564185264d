"""The attention module of the Llama-like families, on fused linears, one rotary-and-cache op and paged attention.

Used for every layer of a model or for none. The original's children and the names in its forward must be those known
from these families. The whole model must still pass its load-time check; otherwise the original modules are restored.
"""

from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel

from loraserve.models.attention import AttentionLayer, layer_of
from loraserve.models.forward_names import uses_only
from loraserve.models.rope import FullWidthRotary, is_half_width
from loraserve.models.structure import AttentionSpec

_CHILDREN = frozenset({"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm"})
_SIZES = frozenset({"head_dim", "num_heads", "num_attention_heads", "num_key_value_heads"})
_LAYOUT = frozenset({"shape", "size", "view", "reshape", "transpose", "contiguous"})
_CHOICES = frozenset({"apply_rotary_pos_emb", "use_rope", "force_rope", "is_sliding", "use_qk_norm"})
_CACHE = frozenset({"update", "layer_idx"})
_INTERFACE = frozenset({"ALL_ATTENTION_FUNCTIONS", "get_interface", "_attn_implementation", "eager_attention_forward"})
_ARGUMENTS = frozenset({"config", "getattr", "scaling", "sliding_window", "attn_logit_softcapping", "sinks"})
_TRAINING = frozenset({"training", "attention_dropout", "residual_dropout", "dropout", "functional", "nn"})
_NAMES = _CHILDREN | _SIZES | _LAYOUT | _CHOICES | _CACHE | _INTERFACE | _ARGUMENTS | _TRAINING
"""Names in those forwards of transformers 5.17 to 5.24 that compute what `FusedAttention` does; a probe confirms it."""
_CLAMPS = frozenset({"clip_qkv", "clamp_"})
"""OLMo's clamps, which do nothing unless the config sets `clip_qkv`."""


@dataclass(frozen=True, slots=True)
class AttentionParts:
    """The parts that the families' attention modules have in common, found by their names in transformers."""

    projections: tuple[nn.Module, ...]
    """(q, k, v), or (qkv,) if the model itself has them as one linear (Phi-3)."""
    output: nn.Module
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    norms_heads: bool
    """The norms are over each head (Qwen 3, Gemma 3), not over all heads together (OLMo 2)."""
    has_rotary: bool


class FusedAttention(nn.Module):
    """Called like the original, on packed batches: hidden_states [1, T, hidden_size] → (the same shape, None)."""

    def __init__(self, spec: AttentionSpec, parts: AttentionParts, layer: AttentionLayer) -> None:
        super().__init__()
        self.parts = parts
        self.layer = layer
        self.spec = spec
        self._q_shape = (spec.num_heads, spec.head_dim)
        self._kv_shape = (spec.num_kv_heads, spec.head_dim)
        sizes = [spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim]
        self._splits = [sizes[0], sizes[1], sizes[1]]

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None = None, **_: object
    ) -> tuple[Tensor, None]:
        context, index, spec = self.layer.context, self.layer.index, self.spec
        batch, backend = context.current_batch(), context.backend
        k_cache, v_cache = context.k_caches[index], context.v_caches[index]
        q, k, v = self._project(hidden_states)
        if self.parts.has_rotary and position_embeddings is not None:  # Granite's hybrids may have none
            cos, sin = position_embeddings
            backend.rotary_kv_write(q, k, v, cos[0], sin[0], k_cache, v_cache, batch.slot_mapping)
        else:
            backend.kv_write(k, v, k_cache, v_cache, batch.slot_mapping)
        output = backend.paged_attention(
            q,
            k_cache,
            v_cache,
            batch,
            scaling=spec.scaling,
            sliding_window=spec.sliding_window,
            softcap=spec.softcap,
            sinks=spec.sinks,
        )
        return self.parts.output(output.flatten(1)[None]), None

    def _project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q: [T, num_heads, head_dim]; k, v: [T, num_kv_heads, head_dim]; the head dimension may be strided."""
        parts = self.parts
        if len(parts.projections) == 1:
            q, k, v = parts.projections[0](hidden_states).split(self._splits, dim=-1)
        else:
            q, k, v = (projection(hidden_states) for projection in parts.projections)
        if parts.q_norm is not None and parts.k_norm is not None and not parts.norms_heads:
            q, k = parts.q_norm(q), parts.k_norm(k)
        q = q[0].unflatten(-1, self._q_shape)
        k = k[0].unflatten(-1, self._kv_shape)
        v = v[0].unflatten(-1, self._kv_shape)
        if parts.q_norm is not None and parts.k_norm is not None and parts.norms_heads:
            q, k = parts.q_norm(q[None])[0], parts.k_norm(k[None])[0]
        return q, k, v


def fuse_attention(model: PreTrainedModel, attention: list[AttentionSpec]) -> dict[str, nn.Module]:
    """Replace every attention module; returns the originals by name, or nothing if any of them is of another kind.

    Also replaces rotary embeddings that return one factor per pair of features, which the backend's op does not take.
    """
    names = {id(module): name for name, module in model.named_modules()}
    originals: dict[str, nn.Module] = {}
    fused: dict[str, nn.Module] = {}
    for spec in attention:
        parts = _parts(spec)
        if parts is None or spec.value_dim != spec.head_dim:
            return {}
        name = names[id(spec.module)]
        originals[name] = spec.module
        fused[name] = FusedAttention(spec, parts, layer_of(spec.module))
    for name, module in model.named_modules():
        if is_half_width(module):
            originals[name], fused[name] = module, FullWidthRotary(module)
    for name, module in fused.items():
        model.set_submodule(name, module)
    return originals


def _parts(spec: AttentionSpec) -> AttentionParts | None:
    module = spec.module
    children = dict(module.named_children())
    q_norm, k_norm = children.pop("q_norm", None), children.pop("k_norm", None)
    output = children.pop("o_proj", None)
    separate = tuple(children.pop(name) for name in ("q_proj", "k_proj", "v_proj") if name in children)
    joined = tuple(children.pop(name) for name in ("qkv_proj",) if name in children)
    if output is None or len(separate) + 3 * len(joined) != 3 or (q_norm is None) != (k_norm is None) or children:
        return None
    clamps = getattr(vars(module).get("config"), "clip_qkv", None) is not None
    if not uses_only(module, _NAMES if clamps else _NAMES | _CLAMPS):
        return None
    use_rope = getattr(module, "use_rope", True)
    norm_size = getattr(q_norm, "num_features", None)
    return AttentionParts(separate or joined, output, q_norm, k_norm, norm_size == spec.head_dim, bool(use_rope))
