"""The ops of multi-head latent attention, around a `paged_attention` over latents."""

from typing import Protocol

from torch import Tensor

from loraserve_kernels.adapter_table import AdapterTable
from loraserve_kernels.latent import (
    UpProjection,
    absorb_keys_reference,
    add_value_biases,
    check_absorb_keys,
    check_expand_values,
    expand_values_reference,
)
from loraserve_kernels.step_batch import Segments


class LatentOps(Protocol):
    """Both apply the up-projection with each row's adapter, as `lora_add` does to a linear's outputs.

    table: None = no row has an adapter. Computed in float32 and rounded once, but biases of values may be rounded
    separately. A row's adapter must be the same in all rows whose latents it attends to.
    """

    def absorb_keys(self, q: Tensor, up: UpProjection, table: AdapterTable | None, segments: Segments) -> Tensor:
        """Queries whose scores with cached latents are those of q with keys.

        q: [T, num_heads, key_dim + rotary_dim], rows and heads may be strided → [T, num_heads, latent_dim +
        rotary_dim]; the rotary part is copied. Without what a bias of keys adds to all of a query's scores.
        """
        ...

    def expand_values(self, x: Tensor, up: UpProjection, table: AdapterTable | None, segments: Segments) -> Tensor:
        """The heads' outputs from sums of latents, weighted with weights that add up to 1.

        x: [T, num_heads, at least latent_dim], of which the first latent_dim are read, rows and heads may be strided →
        [T, num_heads, value_dim].
        """
        ...


class ReferenceLatentOps:
    """`LatentOps` in plain torch."""

    def absorb_keys(self, q: Tensor, up: UpProjection, table: AdapterTable | None, segments: Segments) -> Tensor:
        """See `LatentOps.absorb_keys`."""
        check_absorb_keys(q, up, table, segments)
        return absorb_keys_reference(q, up, table, segments)

    def expand_values(self, x: Tensor, up: UpProjection, table: AdapterTable | None, segments: Segments) -> Tensor:
        """See `LatentOps.expand_values`."""
        check_expand_values(x, up, table, segments)
        values = expand_values_reference(x, up, table, segments)
        if table is not None and segments.has_adapter and table.num_biased:
            add_value_biases(values, up, table, segments)
        return values
