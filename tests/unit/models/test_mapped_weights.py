import ctypes
import sys
from types import SimpleNamespace

import pytest
import torch

from loraserve.models import mapped_weights
from loraserve.models.mapped_weights import MappedWeights


@pytest.mark.parametrize("page_bytes", [4096, 65536])
def test_gives_back_whole_pages_of_any_size(monkeypatch: pytest.MonkeyPatch, page_bytes: int) -> None:
    given_back = []

    def madvise(address: ctypes.c_void_p, length: ctypes.c_size_t, advice: int) -> None:
        given_back.append((address.value, length.value))

    weight = torch.empty(3 * page_bytes + 1, dtype=torch.uint8)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(mapped_weights, "PAGESIZE", page_bytes)
    monkeypatch.setattr(mapped_weights, "_mappings", lambda: [(0, 1 << 64, "/models/model.safetensors")])
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(madvise=madvise))
    MappedWeights().release_pages(weight)
    first_page = -(-weight.data_ptr() // page_bytes)
    num_pages = (weight.data_ptr() + weight.nbytes) // page_bytes - first_page
    assert num_pages >= 2
    assert given_back == [(first_page * page_bytes, num_pages * page_bytes)]
