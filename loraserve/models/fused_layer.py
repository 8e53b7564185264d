"""A decoder layer as one backend op, for layers that consist only of parts that the op knows.

Used for every layer of a model or for none. The whole model must still pass its load-time check; otherwise the original
modules are restored. The check must catch arithmetic between the parts, such as factors on the residual sums. The names
in the layer's forward reveal what it could miss.
"""

from collections.abc import Sequence

from loraserve_kernels.decoder_layer import DecoderLayer, DecoderLayerParts, Norm
from torch import Tensor, nn
from transformers import PreTrainedModel

from loraserve.models.attention import AttentionLayer
from loraserve.models.forward_names import uses_only
from loraserve.models.fused_attention import FusedAttention
from loraserve.models.linears import GroupMember, LinearGroup
from loraserve.models.module_swaps import FusedGateUpMlp, FusedMlp, FusedRmsNorm

_CHILDREN = frozenset({"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
_NAMES = _CHILDREN | {"residual_multiplier"}
"""Names in forwards that compute nothing else. Granite's factor changes every value, which the check notices."""


class FusedDecoderLayer(nn.Module):
    """Called like the original, on packed batches: hidden_states [1, T, hidden_size] → the same shape."""

    def __init__(self, layer: DecoderLayer, attention: AttentionLayer, has_rotary: bool, last_group: int) -> None:
        """last_group: index of its last linear group."""
        super().__init__()
        self.op = layer
        self.attention = attention
        self.has_rotary = has_rotary
        self._last_group = last_group

    def forward(
        self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor] | None = None, **_: object
    ) -> Tensor:
        if hidden_states.shape[1] == 0:
            return hidden_states
        return self.compute(hidden_states[0], position_embeddings)[None]

    def compute(self, rows: Tensor, position_embeddings: tuple[Tensor, Tensor] | None) -> Tensor:
        """rows: [T, hidden_size], T > 0 → the same shape."""
        context, index = self.attention.context, self.attention.index
        rotary = position_embeddings if self.has_rotary else None
        assert rotary is not None or not self.has_rotary
        if context.arrivals is not None:
            context.arrivals.before_group(self._last_group)
        return self.op(
            rows,
            rotary,
            context.k_caches[index],
            context.v_caches[index],
            context.current_batch(),
            context.adapter_table,
        )


class FusedLayers:
    """Consecutive layers, as one op if the backend has it."""

    def __init__(self, layers: Sequence[FusedDecoderLayer]) -> None:
        self._layers = list(layers)
        self._context = layers[0].attention.context
        self._indices = [layer.attention.index for layer in layers]
        self._op = None
        if len({layer.has_rotary for layer in layers}) == 1:
            self._op = self._context.backend.decoder_layers([layer.op for layer in layers])

    def compute(self, rows: Tensor, position_embeddings: tuple[Tensor, Tensor] | None) -> Tensor:
        """As `FusedDecoderLayer.compute`."""
        context = self._context
        if self._op is None or context.arrivals is not None:
            for layer in self._layers:
                rows = layer.compute(rows, position_embeddings)
            return rows
        return self._op(
            rows,
            position_embeddings if self._layers[0].has_rotary else None,
            [context.k_caches[index] for index in self._indices],
            [context.v_caches[index] for index in self._indices],
            context.current_batch(),
            context.adapter_table,
        )


def fuse_layers(model: PreTrainedModel, num_layers: int) -> dict[str, nn.Module]:
    """Replace every decoder layer; returns the originals by name, or nothing if any of them is of another kind."""
    originals: dict[str, nn.Module] = {}
    fused: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(getattr(module, "self_attn", None), FusedAttention):
            layer = _fused(module)
            if layer is None:
                return {}
            originals[name], fused[name] = module, layer
    if len(fused) != num_layers:
        return {}
    for name, module in fused.items():
        model.set_submodule(name, module)
    return originals


def _fused(module: nn.Module) -> FusedDecoderLayer | None:
    children = dict(module.named_children())
    if children.keys() != _CHILDREN or not uses_only(module, _NAMES):
        return None
    attention, mlp = children["self_attn"], children["mlp"]
    input_norm, mlp_norm = _norm(children["input_layernorm"]), _norm(children["post_attention_layernorm"])
    if not isinstance(attention, FusedAttention) or input_norm is None or mlp_norm is None:
        return None
    if attention.spec.sinks is not None:
        return None
    modules = attention.parts
    q_norm, k_norm = _norm(modules.q_norm), _norm(modules.k_norm)
    if modules.q_norm is not None and (q_norm is None or k_norm is None or not modules.norms_heads):
        return None
    qkv, output = _group(modules.projections), _group((modules.output,))
    gate_up, down = _mlp_groups(mlp)
    if qkv is None or output is None or gate_up is None or down is None:
        return None
    spec = attention.spec
    layer = attention.layer.context.backend.decoder_layer(
        DecoderLayerParts(
            qkv=qkv.linear,
            output=output.linear,
            gate_up=gate_up.linear,
            down=down.linear,
            lora_groups=(qkv.lora_group, output.lora_group, gate_up.lora_group, down.lora_group),
            input_norm=input_norm,
            mlp_norm=mlp_norm,
            q_norm=q_norm,
            k_norm=k_norm,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            intermediate_size=down.lora_group.in_features,
            scaling=spec.scaling,
            sliding_window=spec.sliding_window,
            softcap=spec.softcap,
        )
    )
    if layer is None:
        return None
    last_group = max(group.lora_group.group_index for group in (qkv, output, gate_up, down))
    return FusedDecoderLayer(layer, attention.layer, modules.has_rotary, last_group)


def _norm(module: nn.Module | None) -> Norm | None:
    return Norm(module.weight, module.eps) if isinstance(module, FusedRmsNorm) else None


def _mlp_groups(mlp: nn.Module) -> tuple[LinearGroup | None, LinearGroup | None]:
    if isinstance(mlp, FusedMlp):
        return _group((mlp.gate_proj, mlp.up_proj)), _group((mlp.down_proj,))
    if isinstance(mlp, FusedGateUpMlp):
        return _group((mlp.gate_up_proj,)), _group((mlp.down_proj,))
    return None, None


def _group(modules: Sequence[nn.Module]) -> LinearGroup | None:
    """The group whose outputs are exactly those of the modules, in this order; None if there is no such group."""
    members = [module for module in modules if isinstance(module, GroupMember)]
    group = members[0].group if members else None
    if group is None or len(members) != len(modules) or any(member.group is not group for member in members):
        return None
    edges = [0, *(member.end for member in members)]
    is_whole = edges[:-1] == [member.start for member in members] and edges[-1] == sum(group.lora_group.out_features)
    return group if is_whole else None
