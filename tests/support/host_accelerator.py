"""A stand-in for a GPU on which queued copies run only when waited for, so that a missing wait shows."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from threading import Lock, local

import numpy as np
import torch
from torch import Tensor

from loraserve.engine.device.accelerator import Event


def _nothing() -> None:
    """Nothing is queued before an event of the main stream, on which everything is done at once."""


@dataclass(slots=True, eq=False)
class HostEvent:
    """Done once the host has waited for it, or queries it a second time."""

    is_done: bool = False
    reach: Callable[[], None] = _nothing
    """Does the work that is queued before it."""
    _was_asked: bool = False

    def query(self) -> bool:
        if self._was_asked:
            self.synchronize()
        self._was_asked = True
        return self.is_done

    def synchronize(self) -> None:
        self.reach()
        self.is_done = True


@dataclass(slots=True)
class SideStream:
    """Copies that are made only when someone waits for an event queued after them."""

    queued: deque[tuple[Tensor, Tensor] | HostEvent] = field(default_factory=deque)
    _lock: Lock = field(default_factory=Lock)
    _thread: local = field(default_factory=local)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within the block, this thread queues its copies on it."""
        self._thread.is_here = True
        try:
            yield
        finally:
            self._thread.is_here = False

    @property
    def is_current(self) -> bool:
        return getattr(self._thread, "is_here", False)

    def queue(self, item: tuple[Tensor, Tensor] | HostEvent) -> None:
        with self._lock:
            self.queued.append(item)

    def record(self) -> HostEvent:
        event = HostEvent()
        event.reach = lambda: self._run_to(event)
        self.queue(event)
        return event

    def _run_to(self, event: HostEvent) -> None:
        with self._lock:
            while event in self.queued:
                item = self.queued.popleft()
                if not isinstance(item, HostEvent):
                    destination, source = item
                    destination.copy_(source)


@dataclass(slots=True)
class HostAccelerator:
    """`Accelerator` on the CPU. A recording is the call itself: a replay repeats it on the content at that time."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    free: int = 1 << 30
    peak: int = 1 << 20
    events: list[HostEvent] = field(default_factory=list)
    waited_for: list[Event] = field(default_factory=list)
    num_recordings: int = 0
    num_replays: int = 0
    capability: tuple[int, int] = (9, 0)
    needs_locked_memory: bool = True
    side: SideStream = field(default_factory=SideStream)
    _thread: local = field(default_factory=local)

    def __post_init__(self) -> None:
        self.enter_thread()

    def enter_thread(self) -> None:
        self._thread.is_entered = True

    def host_buffer(self, size_bytes: int) -> Tensor:
        return torch.from_numpy(np.zeros(size_bytes, np.uint8))  # takes memory only as it is used

    def copy_to_device(self, destination: Tensor, source: Tensor) -> None:
        self._require_entered()
        if self.side.is_current:
            self.side.queue((destination, source))
        else:
            destination.copy_(source)

    def copy_back(self, source: Tensor, buffer: Tensor) -> HostEvent:
        buffer.copy_(source)
        return self.record()

    def record(self) -> HostEvent:
        event = self.side.record() if self.side.is_current else HostEvent()
        self.events.append(event)
        return event

    def wait_for(self, event: Event) -> None:
        self.waited_for.append(event)
        if not self.side.is_current:
            assert isinstance(event, HostEvent)
            event.reach()

    def on_side_stream(self) -> AbstractContextManager[None]:
        self._require_entered()
        return self.side.entered()

    def _require_entered(self) -> None:
        assert getattr(self._thread, "is_entered", False), "a thread queues work that has not entered the device"

    def capture(self, call: Callable[[], None]) -> Callable[[], None]:
        call()
        self.num_recordings += 1

        def replay() -> None:
            self.num_replays += 1
            call()

        return replay

    def free_bytes(self) -> int:
        return self.free

    def peak_bytes(self, call: Callable[[], object]) -> int:
        call()
        return self.peak
