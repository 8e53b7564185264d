"""The interface of a linear layer of any backend."""

from typing import Protocol

from torch import Tensor


class Linear(Protocol):
    """x Wᵀ + bias with the weight in whatever layout is fastest."""

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., in_features], rows may be strided. Returns [..., out_features], newly allocated."""
        ...

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the weight, bit for bit as it is multiplied. indices: int64 [...], of outputs. Returns
        [..., in_features]. Raises `ValueError` or `IndexError` for a row that does not exist."""
        ...
