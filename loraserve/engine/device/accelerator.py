"""What the engine needs from a GPU besides kernels: memory, events, a second stream and graphs."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Protocol

import torch
from loraserve_kernels.choose_backend import TRITON_CAPABILITY
from torch import Tensor


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Whether the work before it is done."""
        ...

    def synchronize(self) -> None:
        """Wait until it is done."""
        ...


class Copies(Protocol):
    """Copies to memory that steps read, and their order. The current stream is where everything runs unless
    `on_side_stream` says otherwise."""

    needs_locked_memory: bool
    """Whether copies must be from a `host_buffer`."""

    def enter_thread(self) -> None:
        """To be called in every thread except the one that created it, before that thread queues work."""
        ...

    def host_buffer(self, size_bytes: int) -> Tensor:
        """uint8 zeros, page-locked: the device copies from and to it while the host goes on."""
        ...

    def copy_to_device(self, destination: Tensor, source: Tensor) -> None:
        """Queue a copy from a `host_buffer` on the current stream. The host goes on, and must leave the buffer as it
        is.

        A buffer that is dropped is not handed out again before copies from it are done.
        """
        ...

    def record(self) -> Event:
        """An event after everything that is queued on the current stream."""
        ...

    def wait_for(self, event: Event) -> None:
        """Work queued on the current stream from now on runs after the event."""
        ...

    def on_side_stream(self) -> AbstractContextManager[None]:
        """Work queued in the block goes to a stream of its own and does not wait for work queued on the main one."""
        ...


class Accelerator(Copies, Protocol):
    """One device."""

    device: torch.device
    capability: tuple[int, int]
    """NVIDIA's compute capability: (9, 0) for Hopper."""

    def copy_back(self, source: Tensor, buffer: Tensor) -> Event:
        """Queue a copy to a `host_buffer`, which has the values once the event has been waited for."""
        ...

    def capture(self, call: Callable[[], None]) -> Callable[[], None]:
        """Run the call, then record it; the returned function repeats its launches with the values then in its tensors.

        All recordings share their temporary memory, so only one may run at a time.
        """
        ...

    def free_bytes(self) -> int:
        """What any process can still allocate; memory that this process holds but does not use is returned first."""
        ...

    def peak_bytes(self, call: Callable[[], object]) -> int:
        """Temporary memory of a call, above what is allocated before and after it."""
        ...


class CudaAccelerator:
    """`Accelerator` of an NVIDIA GPU."""

    needs_locked_memory = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.capability = torch.cuda.get_device_capability(device)
        self.enter_thread()  # Triton launches on the current device
        self._pool = torch.cuda.graph_pool_handle()
        self._capture_stream = torch.cuda.Stream(device)
        self._side_stream = torch.cuda.Stream(device)

    def enter_thread(self) -> None:
        # NOTE: a thread begins on cuda:0, and leaving the side stream would return to it: on a server for another GPU,
        # that would create a context on cuda:0, of some 500 MB.
        torch.cuda.set_device(self.device)

    def host_buffer(self, size_bytes: int) -> Tensor:
        return torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=True)

    def copy_to_device(self, destination: Tensor, source: Tensor) -> None:
        destination.copy_(source, non_blocking=True)

    def copy_back(self, source: Tensor, buffer: Tensor) -> torch.cuda.Event:
        buffer.copy_(source, non_blocking=True)
        return self.record()

    def record(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record()
        return event

    def wait_for(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        torch.cuda.current_stream().wait_event(event)

    def on_side_stream(self) -> AbstractContextManager[None]:
        return torch.cuda.stream(self._side_stream)

    def capture(self, call: Callable[[], None]) -> Callable[[], None]:
        stream = self._capture_stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()  # compiles kernels and sets up libraries, neither of which can be recorded
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
        return graph.replay

    def free_bytes(self) -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def peak_bytes(self, call: Callable[[], object]) -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_reserved() - before


def choose_device(requested: str, num_gpus: int) -> torch.device:
    """auto = the first GPU if our kernels run on it, else the CPU. Raises `ValueError` with a message for the user."""
    kind, _, number = requested.partition(":")
    if requested == "auto":
        return torch.device("cuda", 0) if _has_served_gpu(num_gpus) else torch.device("cpu")
    if requested == "cpu":
        return torch.device("cpu")
    if kind != "cuda" or not (requested == "cuda" or number.isdecimal()):
        raise ValueError(f"--device {requested} is not supported: choose auto, cpu, cuda or cuda:<number>")
    if torch.version.hip:
        raise ValueError(
            f"--device {requested} cannot be used: torch {torch.__version__} is built for AMD GPUs, but only NVIDIA "
            "GPUs are supported; choose cpu"
        )
    if num_gpus == 0:
        hint = "no NVIDIA GPU is usable" if torch.version.cuda else f"torch {torch.__version__} is a build without CUDA"
        raise ValueError(f"--device {requested} cannot be used: {hint}; choose cpu")
    index = int(number or 0)
    if index >= num_gpus:
        raise ValueError(f"--device {requested} does not exist: this machine has {num_gpus} GPUs, counted from cuda:0")
    return torch.device("cuda", index)


def _has_served_gpu(num_gpus: int) -> bool:
    if num_gpus == 0 or torch.version.hip or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(0) >= TRITON_CAPABILITY


def accelerator_of(device: torch.device) -> Accelerator | None:
    """None for a CPU, which needs none of it."""
    return CudaAccelerator(device) if device.type == "cuda" else None


def upload_ids(ids: Iterable[int], device: torch.device) -> Tensor:
    """int64, see `upload`."""
    return upload(torch.tensor(list(ids), dtype=torch.int64), device)


def upload(on_host: Tensor, device: torch.device) -> Tensor:
    """On the device for work queued there from now on; copied from page-locked memory, so nothing waits."""
    return on_host if device.type == "cpu" else on_host.pin_memory().to(device, non_blocking=True)
