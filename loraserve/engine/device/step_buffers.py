"""The numbers of a step as tensors laid end to end, so that a GPU gets all of them in one copy."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from loraserve.engine.device.accelerator import Accelerator, Event

_ALIGNMENT_BYTES = 256
"""Of each buffer. GPU kernels are compiled again for pointers that are not multiples of 16."""


@dataclass(frozen=True, slots=True)
class BufferSpec:
    shape: tuple[int, ...]
    dtype: type[np.generic]


@dataclass(slots=True)
class Buffer:
    """A numpy array to write and the tensor that ops read."""

    array: np.ndarray
    tensor: Tensor
    """Shares the array's memory; with an accelerator, is on the device, with the values of the last upload."""
    start_bytes: int

    def end_bytes(self, num_rows: int) -> int:
        """End of its first num_rows rows in the storage of all buffers."""
        return self.start_bytes + num_rows * self.array.strides[0]


class StepBuffers:
    """`buffers` in the order of their specs. Buffers of which only a small part is usually in use belong last."""

    def __init__(self, specs: Sequence[BufferSpec], accelerator: Accelerator | None) -> None:
        starts, size_bytes = [], 0
        for spec in specs:
            starts.append(size_bytes)
            num_bytes = int(np.prod(spec.shape)) * np.dtype(spec.dtype).itemsize
            size_bytes += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._accelerator = accelerator
        self._uploaded: Event | None = None
        if accelerator is None:
            self._host = self._device = torch.zeros(size_bytes, dtype=torch.uint8)
        else:
            self._host = accelerator.host_buffer(size_bytes)
            self._device = torch.zeros(size_bytes, dtype=torch.uint8, device=accelerator.device)
        self.buffers = [
            Buffer(*_views(spec, start, self._host.numpy(), self._device), start)
            for spec, start in zip(specs, starts, strict=True)
        ]

    def wait(self) -> None:
        """Wait until the last upload has been read, so that the arrays can be written again."""
        if self._uploaded is not None:
            self._uploaded.synchronize()
            self._uploaded = None

    def upload(self, end_bytes: int) -> None:
        """Queue one copy of everything up to `end_bytes`. The tensors have the new values for work queued after it."""
        assert self._accelerator is not None, "ops read the arrays' own memory"
        self._device[:end_bytes].copy_(self._host[:end_bytes], non_blocking=True)
        self._uploaded = self._accelerator.record()


def _views(spec: BufferSpec, start: int, host: np.ndarray, device: Tensor) -> tuple[np.ndarray, Tensor]:
    end = start + int(np.prod(spec.shape)) * np.dtype(spec.dtype).itemsize
    array = host[start:end].view(spec.dtype).reshape(spec.shape)
    dtype = torch.from_numpy(np.empty(0, spec.dtype)).dtype
    return array, device[start:end].view(dtype).view(spec.shape)
