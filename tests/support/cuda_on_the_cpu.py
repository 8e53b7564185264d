"""Runs code for CUDA and bfloat16 on a CPU in Triton's interpreter, to test that it runs, not what it returns."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from loraserve.engine import startup
from tests.support.host_accelerator import HostAccelerator

GPU_NAME = "A GPU of the tests"
PROPERTIES = SimpleNamespace(multi_processor_count=2, total_memory=1 << 30, major=9, minor=0)


class CudaOnTheCpu(TorchFunctionMode):
    """Puts tensors for a CUDA device on the CPU, and replaces bfloat16, which numpy lacks, with float16."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.bfloat16:
            return args[0].half()
        moved = {name: _moved(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return func(*map(_moved, args), **moved)


class OnlyStream:
    """A stream on which all queued work is already done."""

    def wait_stream(self, other: "OnlyStream") -> None: ...


def _moved(value: object) -> object:
    if value is torch.bfloat16:
        return torch.float16
    is_cuda = isinstance(value, str | torch.device) and str(value).startswith("cuda")
    return torch.device("cpu") if is_cuda else value


@contextmanager
def cuda_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostAccelerator]:
    """In effect within the block; engines for CUDA run on the yielded accelerator."""
    accelerator, chosen, generator = HostAccelerator(), startup.choose_backend, torch.Generator
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: GPU_NAME)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: PROPERTIES)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (PROPERTIES.major, PROPERTIES.minor))
    monkeypatch.setattr(torch.cuda, "manual_seed", torch.manual_seed)
    monkeypatch.setattr(torch.cuda, "Stream", OnlyStream)
    monkeypatch.setattr(torch.cuda, "current_stream", OnlyStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch, "Generator", lambda *_, **__: generator())
    monkeypatch.setattr(startup, "choose_device", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(startup, "choose_backend", lambda device, _, cache_dir: chosen(device, "triton", cache_dir))
    monkeypatch.setattr(startup, "accelerator_of", lambda _: accelerator)
    with CudaOnTheCpu():
        yield accelerator
