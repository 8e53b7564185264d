"""Copies adapters to where steps read them, while steps run.

To a GPU from page-locked memory, copies are queued at once. Otherwise a thread first checks the packed file and reads
it into page-locked memory: into the memory that keeps it or, if there is none, in pieces, while the previous piece is
copied. On a CPU the thread copies from the file.
Hashing and copying large blocks release Python's lock, so that the engine can run.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle

import numpy as np
from torch import Tensor

from loraserve.engine.adapters.arrival import Arrival, CopyParts
from loraserve.engine.device.accelerator import Copies, Event

PIECE_BYTES = 16 << 20
"""Size of each of the two pieces. At the 50 GB/s of a PCIe 5 slot a copy takes 0.3 ms, which hides the cost of starting
it."""

Read = Callable[[], np.ndarray]
"""Returns the verified payload; called in a thread."""
_Locked = Callable[[int, int], Iterator[Tensor]]
"""Yields page-locked tensors with the payload's bytes from one position to another, in order."""


class AdapterUploader:
    """Copies run in the order in which they are queued, in parallel with all steps except those that they `follow`.

    destination: uint8, as long as the payload.
    """

    def __init__(self, copies: Copies, piece_bytes: int = PIECE_BYTES) -> None:
        self._copies = copies
        self._piece_bytes = piece_bytes
        num_pieces = 2 if copies.needs_locked_memory else 0
        self._pieces = cycle([_Piece(copies.host_buffer(piece_bytes)) for _ in range(num_pieces)])
        self._thread = ThreadPoolExecutor(1, "adapter-upload", copies.enter_thread)
        self._filler = ThreadPoolExecutor(1, "adapter-fill")

    def follow(self, event: Event) -> None:
        """Copies that are not queued yet run after the event."""
        with self._copies.on_side_stream():
            self._copies.wait_for(event)

    def start(self, destination: Tensor, parts: CopyParts, locked: Tensor) -> Arrival:
        """locked: the payload in page-locked memory."""
        return self._queue(destination, parts, lambda start, end: iter([locked[start:end]]))

    def start_when(
        self, filled: Future[None], destination: Tensor, parts: CopyParts, locked: Tensor
    ) -> Future[Arrival]:
        """As `start`, in the thread once `locked` is filled; the future raises what filling it raises."""

        def copy() -> Arrival:
            filled.result()
            return self.start(destination, parts, locked)

        return self._thread.submit(copy)

    def start_reading(
        self, destination: Tensor, parts: CopyParts, read: Read, locked: Tensor | None
    ) -> Future[Arrival]:
        """Read and copy in the thread, one adapter at a time. locked: page-locked memory to leave the payload in."""

        def copy() -> Arrival:
            payload = read()
            if not self._copies.needs_locked_memory:
                # Unlike torch's copy, this keeps to one thread, so that steps go on with the others.
                np.copyto(destination.numpy(), payload)
                return Arrival(self._copies, parts, [self._copies.record()] * len(parts.ends))
            source = self._in_pieces(payload) if locked is None else _filling(locked, payload)
            return self._queue(destination, parts, source)

        return self._thread.submit(copy)

    def fill(self, locked: Tensor, read: Read) -> Future[None]:
        """Read the payload into page-locked memory in the background, one adapter at a time."""
        return self._filler.submit(lambda: np.copyto(locked.numpy(), read()))

    def _queue(self, destination: Tensor, parts: CopyParts, source: _Locked) -> Arrival:
        copies = self._copies
        copied: list[Event] = []
        start = 0
        with copies.on_side_stream():
            for end in parts.ends:
                for locked in source(start, end):
                    copies.copy_to_device(destination[start : start + len(locked)], locked)
                    start += len(locked)
                copied.append(copies.record())
        return Arrival(copies, parts, copied)

    def _in_pieces(self, payload: np.ndarray) -> _Locked:
        def pieces(start: int, end: int) -> Iterator[Tensor]:
            for position in range(start, end, self._piece_bytes):
                piece = next(self._pieces)
                yield piece.fill(payload[position : min(position + self._piece_bytes, end)])
                piece.copied = self._copies.record()

        return pieces


def _filling(locked: Tensor, payload: np.ndarray) -> _Locked:
    array = locked.numpy()

    def parts(start: int, end: int) -> Iterator[Tensor]:
        np.copyto(array[start:end], payload[start:end])
        yield locked[start:end]

    return parts


class _Piece:
    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._array = buffer.numpy()
        self.copied: Event | None = None
        """Event after the copy from it."""

    def fill(self, data: np.ndarray) -> Tensor:
        if self.copied is not None:
            self.copied.synchronize()
        np.copyto(self._array[: len(data)], data)
        return self._buffer[: len(data)]
