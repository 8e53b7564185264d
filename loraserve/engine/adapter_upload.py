"""Adapters on their way into a GPU's memory, beside the steps that run meanwhile.

A thread checks and reads the packed file into page-locked memory, piece by piece, while the piece before is copied to
the device on a stream of its own. Hashing and copying large blocks leave Python's lock to the engine.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import cycle

import numpy as np
from torch import Tensor

from loraserve.engine.accelerator import Accelerator, Event

PIECE_BYTES = 16 << 20
"""Of two. At the 50 GB/s of a PCIe 5 slot a copy takes 0.3 ms, which the cost of starting it disappears in."""


class Upload:
    """One adapter's."""

    def __init__(self, accelerator: Accelerator, copied: Future[Event]) -> None:
        self._accelerator = accelerator
        self._copied = copied

    def is_done(self) -> bool:
        """Whether `finish` waits for nothing; also when it would raise."""
        return self._copied.done() and (self._copied.exception() is not None or self._copied.result().query())

    def wait(self) -> None:
        """Until it is done."""
        wait([self._copied])
        if self._copied.exception() is None:
            self._copied.result().synchronize()

    def finish(self) -> None:
        """Steps queued from now on run after it. Waits for the thread; raises what reading the file has raised."""
        self._accelerator.wait_for(self._copied.result())


class AdapterUploader:
    """One upload after the other."""

    def __init__(self, accelerator: Accelerator, piece_bytes: int = PIECE_BYTES) -> None:
        self._accelerator = accelerator
        self._piece_bytes = piece_bytes
        self._pieces = cycle([_Piece(accelerator.host_buffer(piece_bytes)) for _ in range(2)])
        self._thread = ThreadPoolExecutor(1, "adapter-upload")

    def start(self, destination: Tensor, read: Callable[[], np.ndarray]) -> Upload:
        """destination: uint8, as long as what read, called in the thread, returns.

        Copies wait for the steps queued by now, which may still need what is there.
        """
        behind = self._accelerator.record()
        return Upload(self._accelerator, self._thread.submit(self._copy, destination, read, behind))

    def _copy(self, destination: Tensor, read: Callable[[], np.ndarray], behind: Event) -> Event:
        payload = read()
        with self._accelerator.on_side_stream():
            self._accelerator.wait_for(behind)
            for start in range(0, len(payload), self._piece_bytes):
                piece = next(self._pieces)
                end = min(start + self._piece_bytes, len(payload))
                filled = piece.fill(payload[start:end])
                destination[start:end].copy_(filled, non_blocking=True)
                piece.event = self._accelerator.record()
            return self._accelerator.record()


class _Piece:
    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._array = buffer.numpy()
        self.event: Event | None = None
        """Of the copy from it."""

    def fill(self, data: np.ndarray) -> Tensor:
        if self.event is not None:
            self.event.synchronize()
        np.copyto(self._array[: len(data)], data)
        return self._buffer[: len(data)]
