"""A stand-in for a GPU in which everything queued runs when told to, so that what is not waited for shows."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from loraserve.engine.accelerator import Event


@dataclass(slots=True)
class HostEvent:
    """Passed once something has waited for it or asked before."""

    is_done: bool = False

    def query(self) -> bool:
        was_done, self.is_done = self.is_done, True
        return was_done

    def synchronize(self) -> None:
        self.is_done = True


@dataclass(slots=True)
class HostAccelerator:
    """`Accelerator` on the CPU. A recording is the call itself: kernels are launched again, with what is then there."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    free: int = 1 << 30
    peak: int = 1 << 20
    events: list[HostEvent] = field(default_factory=list)
    waited_for: list[Event] = field(default_factory=list)
    num_recordings: int = 0
    num_replays: int = 0

    def host_buffer(self, size_bytes: int) -> Tensor:
        return torch.zeros(size_bytes, dtype=torch.uint8)

    def record(self) -> HostEvent:
        self.events.append(HostEvent())
        return self.events[-1]

    def wait_for(self, event: Event) -> None:
        self.waited_for.append(event)

    def on_side_stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def capture(self, call: Callable[[], None]) -> Callable[[], None]:
        call()
        self.num_recordings += 1

        def replay() -> None:
            self.num_replays += 1
            call()

        return replay

    def free_bytes(self) -> int:
        return self.free

    def peak_bytes(self, call: Callable[[], None]) -> int:
        call()
        return self.peak
