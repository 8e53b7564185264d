"""What a linear layer is, whichever backend made it."""

from typing import Protocol

from torch import Tensor


class Linear(Protocol):
    """x Wᵀ + bias with the weight in whatever layout is fastest."""

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., in_features], rows may be strided → [..., out_features], newly allocated."""
        ...


class PacksRows(Linear, Protocol):
    """A linear whose weight is in a layout of the backend's own, which serves as a table of embeddings too."""

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the weight, bit for bit. indices: int64 [...] → [..., in_features]. `ValueError` outside of it."""
        ...
