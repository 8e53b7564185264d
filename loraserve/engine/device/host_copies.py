"""`Copies` within a CPU's memory: each is done when the call returns."""

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from loraserve.engine.device.accelerator import Event


class _Done:
    """`Event` of work that is done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class HostCopies:
    needs_locked_memory = False

    def enter_thread(self) -> None:
        pass

    def host_buffer(self, size_bytes: int) -> Tensor:
        return torch.zeros(size_bytes, dtype=torch.uint8)

    def copy_to_device(self, destination: Tensor, source: Tensor) -> None:
        # Unlike torch's copy, this keeps to one thread, so that steps go on with the others.
        np.copyto(destination.numpy(), source.numpy())

    def record(self) -> Event:
        return _Done()

    def wait_for(self, event: Event) -> None:
        pass

    def on_side_stream(self) -> AbstractContextManager[None]:
        return nullcontext()
