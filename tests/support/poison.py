"""Ensures that new memory never holds, by luck, what an op should have written there."""

import pytest
import torch
from torch import Tensor


def poison_new_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on `torch.empty` and `torch.empty_like` return tensors filled by `poisoned`."""
    for name in ("empty", "empty_like"):
        allocate = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, make=allocate, **options: poisoned(make(*args, **options)))


def poisoned(tensor: Tensor) -> Tensor:
    """Filled with NaN, the largest integer or False."""
    if tensor.is_floating_point():
        return tensor.fill_(float("nan"))
    return tensor.zero_() if tensor.dtype is torch.bool else tensor.fill_(torch.iinfo(tensor.dtype).max)
