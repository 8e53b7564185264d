import platform
from types import SimpleNamespace

import pytest
import torch

from loraserve.models.cpu_features import has_fast_bfloat16


@pytest.fixture(autouse=True)
def on_x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


def answer(monkeypatch: pytest.MonkeyPatch, onednn: bool, avx512_bf16: bool) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace(_is_mkldnn_bf16_supported=lambda: onednn))
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)


@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("avx512_bf16", [True, False])
def test_x86_needs_avx512_bf16_and_onednn(monkeypatch: pytest.MonkeyPatch, onednn: bool, avx512_bf16: bool) -> None:
    answer(monkeypatch, onednn, avx512_bf16)
    assert has_fast_bfloat16() == (onednn and avx512_bf16)


@pytest.mark.parametrize("onednn", [True, False])
def test_arm_needs_only_onednn(monkeypatch: pytest.MonkeyPatch, onednn: bool) -> None:
    answer(monkeypatch, onednn, avx512_bf16=False)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert has_fast_bfloat16() == onednn


@pytest.mark.parametrize("is_available", [True, False])
def test_bfloat16_is_slow_without_onednn(monkeypatch: pytest.MonkeyPatch, is_available: bool) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: is_available)
    assert not has_fast_bfloat16()
