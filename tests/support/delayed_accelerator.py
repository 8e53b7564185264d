"""A stand-in for a GPU that lags behind the host: data copied back is rubbish until the host has waited for it."""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from tests.support.host_accelerator import HostAccelerator, HostEvent

RUBBISH = 0xA5
"""Every byte of data that has not arrived yet."""


class DelayedAccelerator(HostAccelerator):
    """Kernels run immediately, so that the device's own tensors are right; events complete in stream order."""

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
