"""A stand-in for a GPU that is behind the host: what it sends back is rubbish until it has been waited for."""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from tests.support.host_accelerator import HostAccelerator, HostEvent

RUBBISH = 0xA5
"""In every byte of what has not arrived."""


class DelayedAccelerator(HostAccelerator):
    """Kernels run at once, so that the device's own tensors are right; events pass in the order of the stream."""

    def __init__(self) -> None:
        super().__init__()
        self._stream: deque[tuple[HostEvent, Callable[[], object]]] = deque()

    def copy_back(self, source: Tensor, buffer: Tensor) -> HostEvent:
        values = source.clone()
        buffer.view(torch.uint8).fill_(RUBBISH)
        return self._queue(lambda: buffer.copy_(values))

    def record(self) -> HostEvent:
        return super().record() if self.side.is_current else self._queue(lambda: None)

    def _queue(self, happen: Callable[[], object]) -> HostEvent:
        event = HostEvent()
        event.reach = lambda: self._run_to(event)
        self._stream.append((event, happen))
        self.events.append(event)
        return event

    def _run_to(self, event: HostEvent) -> None:
        while not event.is_done:
            passed, happen = self._stream.popleft()
            happen()
            passed.is_done = True
