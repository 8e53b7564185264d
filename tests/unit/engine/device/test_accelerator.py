from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from loraserve.engine.device import accelerator
from loraserve.engine.device.accelerator import accelerator_of, choose_device, upload_ids


@pytest.mark.parametrize(
    ("requested", "num_gpus", "expected"),
    [("auto", 0, "cpu"), ("cpu", 2, "cpu"), ("cuda", 2, "cuda:0"), ("cuda:1", 2, "cuda:1")],
)
def test_the_requested_device_is_chosen(requested: str, num_gpus: int, expected: str) -> None:
    assert choose_device(requested, num_gpus) == torch.device(expected)


@pytest.mark.parametrize(
    ("capability", "has_triton", "expected"),
    [((9, 0), True, "cuda:0"), ((8, 0), True, "cuda:0"), ((7, 5), True, "cpu"), ((9, 0), False, "cpu")],
)
def test_auto_chooses_a_gpu_only_if_the_kernels_run_on_it(
    capability: tuple[int, int], has_triton: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(accelerator, "find_spec", lambda _: object() if has_triton else None)
    assert choose_device("auto", 2) == torch.device(expected)


@pytest.mark.parametrize(
    ("requested", "num_gpus", "message"),
    [
        ("cuda", 0, "--device cuda cannot be used: .*; choose cpu"),
        ("cuda:2", 2, "--device cuda:2 does not exist: this machine has 2 GPUs, counted from cuda:0"),
        ("mps", 2, "--device mps is not supported: choose auto, cpu, cuda or cuda:<number>"),
        ("cuda:", 2, "--device cuda: is not supported"),
        ("cuda:-1", 2, "--device cuda:-1 is not supported"),
    ],
)
def test_a_missing_or_unsupported_device_is_refused_with_the_choices(
    requested: str, num_gpus: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        choose_device(requested, num_gpus)


def test_an_amd_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """To torch it is a CUDA device, but Triton would reject the options for NVIDIA GPUs in the first compilation."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(ValueError, match=r"--device cuda cannot be used: .* AMD GPUs, .* choose cpu"):
        choose_device("cuda", 2)
    assert choose_device("auto", 2) == torch.device("cpu")


def test_a_cpu_needs_no_accelerator() -> None:
    assert accelerator_of(torch.device("cpu")) is None


class PageLocked(TorchFunctionMode):
    """Fakes page-locking without a GPU, and records how page-locked tensors are copied."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors: list[Tensor] = []
        self.copies: list[tuple[list[int], Mapping[str, Any] | None]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.pin_memory:
            self._tensors.append(args[0].clone())
            return self._tensors[-1]
        if func is Tensor.to and any(args[0] is tensor for tensor in self._tensors):
            self.copies.append((args[0].tolist(), kwargs))
        return func(*args, **kwargs or {})


def test_ids_are_copied_to_a_device_without_waiting() -> None:
    with PageLocked() as page_locked:
        on_device = upload_ids({5: 0, 2: 1}, torch.device("meta"))
        on_host = upload_ids([5, 2], torch.device("cpu"))
    assert page_locked.copies == [([5, 2], {"non_blocking": True})]
    assert (on_device.device.type, on_device.shape, on_device.dtype) == ("meta", (2,), torch.int64)
    assert (on_host.tolist(), on_host.dtype) == ([5, 2], torch.int64)
