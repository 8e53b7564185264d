"""Our paged attention, registered with transformers' `AttentionInterface` under `ATTENTION_NAME`.

No mask function is registered for that name, so transformers builds no mask.
"""

from dataclasses import dataclass

from loraserve_kernels.latent import UpProjection
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface

from loraserve.models.context import ForwardContext
from loraserve.models.latent_attention import attend_to_latents

ATTENTION_NAME = "loraserve"


_ATTRIBUTE = "loraserve_attention"


@dataclass(slots=True)
class AttentionLayer:
    """What our attention needs to know about the transformers attention module that calls it."""

    index: int
    """Index of its caches in the context."""
    context: ForwardContext
    up: UpProjection | None = None
    """Of latent attention, whose keys and values are latents."""


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

    query: [1, num_heads, T, head_dim]; key, value: [1, num_kv_heads, T, head_dim or fewer for values]; returns
    [1, T, num_heads, values' head_dim]. Smaller values are stored with zeros after them.
    Whatever else a model passes is proven irrelevant by the load-time self-check.
    """
    layer = layer_of(module)
    context = layer.context
    batch = context.current_batch()
    q, k, v = (heads[0].transpose(0, 1) for heads in (query, key, value))
    k_cache, v_cache = context.k_caches[layer.index], context.v_caches[layer.index]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if layer.up is not None:
        return attend_to_latents(context, layer.up, q, k, k_cache, scale)[None], None
    value_dim = v.shape[-1]
    if value_dim < k.shape[-1]:
        v = pad(v, (0, k.shape[-1] - value_dim))
    context.backend.kv_write(k, v, k_cache, v_cache, batch.slot_mapping)
    output = context.backend.paged_attention(
        q,
        k_cache,
        v_cache,
        batch,
        scaling=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return output[None, ..., :value_dim], None


AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
