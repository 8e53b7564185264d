"""Our paged attention, registered with transformers' `AttentionInterface` under `ATTENTION_NAME`.

No mask function is registered for that name, so transformers builds no mask.
"""

from dataclasses import dataclass

from torch import Tensor, nn
from transformers import AttentionInterface

from loraserve.models.context import ForwardContext

ATTENTION_NAME = "loraserve"


_ATTRIBUTE = "loraserve_attention"


@dataclass(slots=True)
class AttentionLayer:
    """What our attention needs to know about the transformers attention module that calls it."""

    index: int
    """Index of its caches in the context."""
    context: ForwardContext


def attach_layer(module: nn.Module, layer: AttentionLayer) -> None:
    # `nn.Module` is typed as having only tensors and modules as attributes.
    vars(module)[_ATTRIBUTE] = layer


def layer_of(module: nn.Module) -> AttentionLayer:
    """The layer that `attach_layer` attached to it."""
    return vars(module)[_ATTRIBUTE]


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Write the step's K and V, then attend over the paged context.

    query: [1, num_heads, T, head_dim]; key, value: [1, num_kv_heads, T, head_dim]; returns [1, T, num_heads, head_dim].
    Whatever else a model passes is proven irrelevant by the load-time self-check.
    """
    layer = layer_of(module)
    context = layer.context
    batch = context.current_batch()
    k_cache, v_cache = context.k_caches[layer.index], context.v_caches[layer.index]
    context.backend.kv_write(key[0].transpose(0, 1), value[0].transpose(0, 1), k_cache, v_cache, batch.slot_mapping)
    output = context.backend.paged_attention(
        query[0].transpose(0, 1),
        k_cache,
        v_cache,
        batch,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return output[None], None


AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
