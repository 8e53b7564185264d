"""Multi-head latent attention (DeepSeek V2 and V3, GLM-4.7-Flash, MiniCPM3, Youtu): the KV cache holds latents.

In transformers, the modules of all families expand latents to keys and values in a method of one name. A prepared
module hands the latents themselves to our attention, which applies the up-projection to queries and outputs instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from loraserve_kernels.adapter_table import LoraGroup
from loraserve_kernels.latent import UpProjection
from torch import Tensor, nn

from loraserve.models.context import ForwardContext

_EXPAND = "expand_kv"
_LINEAR = "kv_b_proj"


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """The up-projection of an attention module."""

    linear_name: str
    linear: nn.Linear
    key_dim: int
    """Of each head's key, without the part that is rotated."""
    rotary_dim: int

    @property
    def head_dim(self) -> int:
        """Elements that the KV cache holds per token: the latent and the rotated part, which all heads share."""
        return self.linear.in_features + self.rotary_dim

    def up_projection(self, num_heads: int, group: LoraGroup) -> UpProjection:
        return UpProjection(self.linear.weight.detach(), num_heads, self.key_dim, group)


def find_latent(module: nn.Module, num_heads: int, value_dim: int, names: Mapping[nn.Linear, str]) -> LatentSpec | None:
    """None if it is not such a module, and on GPUs, whose attention kernels have no room for latents.

    value_dim: of the values that the module hands to the attention interface. names: of linears with an input of their
    own that can have adapters.
    """
    linear = getattr(module, _LINEAR, None)
    key_dim, rotary_dim = getattr(module, "qk_nope_head_dim", None), getattr(module, "qk_rope_head_dim", None)
    if (
        not isinstance(linear, nn.Linear)
        or linear not in names
        or linear.weight.device.type != "cpu"
        or not hasattr(module, _EXPAND)
    ):
        return None
    if not isinstance(key_dim, int) or not isinstance(rotary_dim, int) or linear.bias is not None:
        return None
    if linear.out_features != num_heads * (key_dim + value_dim):
        return None
    return LatentSpec(names[linear], linear, key_dim, rotary_dim)


def attach_latents(module: nn.Module, context: ForwardContext) -> None:
    """In a step, let the module pass its latents on as keys and as values: [1, 1, T, latent_dim + rotary_dim]."""
    expand = getattr(module, _EXPAND)

    def latents(kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        if context.batch is None:
            return expand(kv_nope, k_rot)
        cached = torch.cat([kv_nope, k_rot], dim=-1)
        return cached, cached

    setattr(module, _EXPAND, latents)


def attend_to_latents(
    context: ForwardContext, up: UpProjection, q: Tensor, latents: Tensor, cache: Tensor, scaling: float
) -> Tensor:
    """q: [T, num_heads, key_dim + rotary_dim]; latents: [T, 1, latent_dim + rotary_dim] → [T, num_heads, value_dim].

    cache: of the layer, for keys and values at once: the first latent_dim columns of what attention returns are sums of
    latents.
    """
    batch, backend = context.current_batch(), context.backend
    table = context.adapter_table if batch.segments.has_adapter else None
    if table is not None:
        context.await_adapters(up.group)
    queries = backend.absorb_keys(q, up, table, batch.segments)
    backend.kv_write(latents, latents, cache, cache, batch.slot_mapping)
    attended = backend.paged_attention(queries, cache, cache, batch, scaling=scaling)
    return backend.expand_values(attended, up, table, batch.segments)
