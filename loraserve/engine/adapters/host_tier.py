"""Verified adapters in page-locked memory: an adapter evicted from a GPU returns without its file being read or hashed.

The memory is one slab, locked at the start, because locking pages takes longer than copying them.
"""

from collections import OrderedDict
from collections.abc import Container
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import pairwise

from loraserve_adapters.file_state import FileState
from loraserve_adapters.packed import ALIGNMENT_BYTES, PackedTable
from torch import Tensor

from loraserve.engine.adapters.extents import Extents
from loraserve.engine.device.accelerator import Accelerator, Copies, Event
from loraserve.engine.errors import EngineStartError

DEFAULT_SHARE = 0.1
"""Of the memory available on the host."""
MAX_DEFAULT_BYTES = 4 << 30
_FLAG = "--adapter-host-memory-bytes"


def choose_host_tier_bytes(requested: int | None, accelerator: Accelerator | None, available_bytes: int) -> int:
    """0 = no tier. accelerator: None on a CPU. Raises `EngineStartError`."""
    if accelerator is None:
        if requested:
            raise EngineStartError(f"{_FLAG} {requested} is for GPUs only, but this is a CPU: omit it")
        return 0
    if requested is None:
        most = min(int(DEFAULT_SHARE * available_bytes), MAX_DEFAULT_BYTES)
        return 1 << (most.bit_length() - 1) if most else 0
    if locked_bytes(requested) > available_bytes:
        raise EngineStartError(
            f"{_FLAG} {requested} locks {locked_bytes(requested)} bytes, but only {available_bytes} are "
            "available: lower it"
        )
    return requested


def locked_bytes(size_bytes: int) -> int:
    """What torch locks for this size: the next power of two."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes else 0


@dataclass(slots=True)
class StagedAdapter:
    table: PackedTable
    payload: Tensor
    """uint8, in the slab; a thread writes it while the adapter is `filling` or on its way to the GPU."""
    start: int
    """Where it starts in the slab."""
    file: FileState
    """State of the file before it was read."""
    filling: Future[None] | None = None
    """None = complete, or filled on its first way to the GPU."""
    copied: Event | None = None
    """Event after the last copy from it."""

    @property
    def is_idle(self) -> bool:
        """Neither `filling` writes its memory nor a copy reads it."""
        return (self.filling is None or self.filling.done()) and (self.copied is None or self.copied.query())

    @property
    def is_filled(self) -> bool:
        """Whether `filling` has ended successfully."""
        filling = self.filling
        return filling is not None and filling.done() and not filling.cancelled() and filling.exception() is None

    def settle(self) -> None:
        """Wait until it is idle; cancels a `filling` that has not begun."""
        if self.filling is not None and not self.filling.cancel():
            wait([self.filling])
        if self.copied is not None:
            self.copied.synchronize()


class HostTier:
    """By digest; the least recently used are forgotten first. For one thread; `try_stage` never waits."""

    def __init__(self, copies: Copies, size_bytes: int) -> None:
        """Raises `EngineStartError`."""
        self._extents = Extents(size_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
        try:
            self._slab = copies.host_buffer(self._extents.size)
        except RuntimeError as error:
            raise EngineStartError(f"{_FLAG} {size_bytes} cannot be page-locked: lower it ({error})") from error
        self._staged: OrderedDict[str, StagedAdapter] = OrderedDict()

    @property
    def used_bytes(self) -> int:
        return self._extents.size - self._extents.num_free

    def find(self, digest: str, file: FileState | None) -> StagedAdapter | None:
        """The adapter, complete or `filling`, now the most recently used. None if its file has changed or `filling`
        failed: it is then forgotten."""
        staged = self._staged.get(digest)
        if staged is None:
            return None
        if staged.is_filled:
            staged.filling = None
        has_failed = staged.filling is not None and staged.filling.done()
        if staged.file != file or has_failed:
            self.forget(digest)
            return None
        self._staged.move_to_end(digest)
        return staged

    def try_stage(
        self, digest: str, table: PackedTable, size_bytes: int, file: FileState, busy: Container[str]
    ) -> StagedAdapter | None:
        """Memory for an adapter that has none, as the most recently used; None if forgetting idle ones is not enough.

        busy: adapters that must not be forgotten either.
        """
        staged = self.try_stage_free(digest, table, size_bytes, file)
        if staged is None and size_bytes <= self._extents.size:
            for other in [other for other, found in self._staged.items() if other not in busy and found.is_idle]:
                self.forget(other)
                staged = self.try_stage_free(digest, table, size_bytes, file)
                if staged is not None:
                    break
        return staged

    def try_stage_free(self, digest: str, table: PackedTable, size_bytes: int, file: FileState) -> StagedAdapter | None:
        """As `try_stage`, but forgets no other adapter."""
        assert digest not in self._staged, f"adapter {digest[:12]} is staged twice"
        start = self._extents.try_allocate(size_bytes)
        if start is None:
            return None
        staged = self._staged[digest] = StagedAdapter(table, self._slab[start : start + size_bytes], start, file)
        return staged

    def note_copied(self, digest: str, copied: Event) -> None:
        """It is complete, and a copy reads it until that event. A no-op if it is unknown."""
        staged = self._staged.get(digest)
        if staged is not None:
            staged.filling, staged.copied = None, copied

    def forget(self, digest: str) -> None:
        """Wait until it is idle and free its memory. A no-op if it is unknown."""
        staged = self._staged.pop(digest, None)
        if staged is not None:
            staged.settle()
            self._extents.free(staged.start, len(staged.payload))

    def check_invariants(self) -> None:
        """Raises AssertionError naming what does not hold."""
        spans = sorted((s.start, s.start + len(s.payload)) for s in self._staged.values())
        assert all(a[1] <= b[0] for a, b in pairwise(spans)), "adapters overlap in the host tier"
        assert sum(end - start for start, end in spans) == self.used_bytes, "memory of the host tier was lost"
