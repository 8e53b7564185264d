"""Adapters on their way into the arena: read by a thread, then copied, or copied at once to a GPU from the host tier.

One is loading until all its copies are queued, then `arriving` until they are done or the main stream waits for them.
"""

from collections.abc import Callable, Set
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from loraserve_adapters.errors import AdapterError
from loraserve_adapters.file_state import FileState, file_state
from loraserve_adapters.packed import PackedAdapter, PackedTable
from torch import Tensor

from loraserve.engine.adapters.arrival import Arrival, copy_parts
from loraserve.engine.adapters.host_tier import HostTier, StagedAdapter
from loraserve.engine.adapters.upload import AdapterUploader, Read
from loraserve.engine.device.accelerator import Copies, Event


@dataclass(slots=True)
class FoundAdapter:
    """An adapter that can be brought into the arena."""

    table: PackedTable
    size_bytes: int
    file: FileState | None
    """State of the file before its header was read."""
    staged: StagedAdapter | None
    """None = its file must be read."""


@dataclass(slots=True)
class _Loading:
    queued: Future[Arrival]
    file: FileState | None


@dataclass(slots=True)
class _Failure:
    file: FileState | None
    error: AdapterError


class AdapterTransit:
    """By digest; for the engine's thread only. The caller must know which adapters are in the arena already."""

    def __init__(self, copies: Copies, host_tier_bytes: int, element_bytes: int) -> None:
        """host_tier_bytes: 0 = nothing is kept on the host. element_bytes: of the packed dtype."""
        self._copies = copies
        self._uploader = AdapterUploader(copies)
        self._tier = HostTier(copies, host_tier_bytes) if host_tier_bytes else None
        self._element_bytes = element_bytes
        self._last_read: dict[str, Event] = {}
        """For adapters that were used: an event after the last step queued when the last reference was released."""
        self._loading: dict[str, _Loading] = {}
        self._failed: dict[str, _Failure] = {}
        """Not reported yet."""
        self.arriving: dict[str, Arrival] = {}

    @property
    def loading(self) -> set[str]:
        return set(self._loading)

    def is_loading(self, digest: str) -> bool:
        return digest in self._loading

    def is_being_copied(self, digest: str) -> bool:
        """Whether a step that uses it would wait."""
        arrival = self.arriving.get(digest)
        return arrival is not None and not _has_arrived(arrival)

    def note_released(self, digest: str) -> None:
        """No step that is queued from now on reads it until it is acquired again."""
        self._last_read[digest] = self._copies.record()

    def note_evicted(self, digest: str) -> None:
        """Its memory may be reused: copies not queued yet wait for the steps that read it."""
        last_read = self._last_read.pop(digest, None)
        if last_read is not None:
            self._uploader.follow(last_read)

    def follow_steps(self) -> None:
        """Copies not queued yet wait for everything that is queued on the main stream now."""
        self._uploader.follow(self._copies.record())

    def prefill(self, digest: str, packed: PackedAdapter, file: FileState | None, read: Read) -> None:
        """Read it into the host tier in the background, if there is free space and it is not there yet.

        file: state before `packed` was read.
        """
        if self._tier is None or file is None or digest in self._loading:
            return
        if self._tier.find(digest, file) is not None:
            return
        staged = self._tier.try_stage_free(digest, packed.table, packed.size_bytes, file)
        if staged is not None:
            staged.filling = self._uploader.fill(staged.payload, read)

    def stage(self, digest: str, found: FoundAdapter, read: Read, upcoming: Set[str] = frozenset()) -> None:
        """As `prefill`, but may replace the tier's least recently used adapters, except those in `upcoming`."""
        staged = None if found.staged is not None else self._try_stage(digest, found, upcoming)
        if staged is not None:
            staged.filling = self._uploader.fill(staged.payload, read)

    def find(self, digest: str, path: Path, read_header: Callable[[], PackedAdapter]) -> FoundAdapter:
        """The adapter in the host tier, if its file has not changed since it was read, else in its file.

        Raises `AdapterError`; if reading the same file has failed before, raises that error once.
        """
        file = file_state(path)
        failure = self._failed.pop(digest, None)
        if failure is not None and failure.file == file:
            raise failure.error
        staged = None if self._tier is None else self._tier.find(digest, file)
        if staged is not None:
            return FoundAdapter(staged.table, len(staged.payload), file, staged)
        packed = read_header()
        return FoundAdapter(packed.table, packed.size_bytes, file, None)

    def start(self, digest: str, found: FoundAdapter, destination: Tensor, read: Read) -> None:
        """destination: uint8 [size_bytes]. read: of its file; called in a thread unless the host tier has the data."""
        parts = copy_parts(found.table.group_starts, found.size_bytes, self._element_bytes)
        uploader, staged = self._uploader, found.staged
        if staged is not None and staged.filling is None:
            arrival = self.arriving[digest] = uploader.start(destination, parts, staged.payload)
            staged.copied = arrival.last
            return
        if staged is not None and staged.filling is not None and not staged.filling.cancel():
            queued = uploader.start_when(staged.filling, destination, parts, staged.payload)
        else:
            staged = staged or self._try_stage(digest, found)
            locked = None
            if staged is not None:
                staged.filling, locked = None, staged.payload
            queued = uploader.start_reading(destination, parts, read, locked)
        self._loading[digest] = _Loading(queued, found.file)

    def finish_loading(self) -> list[str]:
        """Finish all loads that are ready. Returns those that failed, see `finish_failed`."""
        return [digest for digest in list(self._loading) if self.finish_failed(digest)]

    def finish_failed(self, digest: str) -> bool:
        """Finish loading it if it is ready. True: it failed and is no longer on its way; `find` will raise why."""
        loading = self._loading.get(digest)
        if loading is None or not loading.queued.done():
            return False
        try:
            self._finish(digest)
        except AdapterError as error:
            self._failed[digest] = _Failure(loading.file, error)
            return True
        return False

    def has_news(self) -> bool:
        """Whether `finish_loading` or `take_arrived` would find any."""
        return any(loading.queued.done() for loading in self._loading.values()) or any(
            map(_has_arrived, self.arriving.values())
        )

    def take_arrived(self) -> list[str]:
        """Adapters whose memory can be reused from now on, by work on the main stream or the side stream."""
        arrived = [digest for digest, arrival in self.arriving.items() if _has_arrived(arrival)]
        for digest in arrived:
            del self.arriving[digest]
        return arrived

    def wait_for_oldest(self, timeout_s: float) -> None:
        """Wait until the oldest load has been read, or for `timeout_s`; if none is being read, until the oldest copy
        has arrived.

        Returns at once if there is neither.
        """
        for loading in self._loading.values():
            wait([loading.queued], timeout_s)
            return
        for arrival in self.arriving.values():
            arrival.last.synchronize()
            return

    def cancel_queued(self) -> list[str]:
        """Cancel loads that have not begun, and return them; none with a host tier, which may be filled for them."""
        if self._tier is not None:
            return []
        cancelled = [digest for digest, loading in self._loading.items() if loading.queued.cancel()]
        for digest in cancelled:
            del self._loading[digest]
        return cancelled

    def wait_for_all(self) -> None:
        """Work queued on the main stream from now on finds all of them there. Waits for the thread."""
        for digest, loading in list(self._loading.items()):
            wait([loading.queued])
            if loading.queued.exception() is None:
                self._finish(digest)
        for arrival in self.arriving.values():
            arrival.before_all()

    def forget(self, digest: str) -> None:
        """Forget it, also in the host tier. Waits for the thread if it has begun; then its memory can be reused."""
        self._failed.pop(digest, None)
        loading = self._loading.get(digest)
        if loading is not None and loading.queued.cancel():
            del self._loading[digest]
        elif loading is not None:
            wait([loading.queued])
            with suppress(AdapterError):
                self._finish(digest)
        if digest in self.arriving:
            self.arriving.pop(digest).before_all()
        if self._tier is not None:
            self._tier.forget(digest)

    def check_invariants(self) -> None:
        """Raises AssertionError naming what does not hold."""
        assert not self._loading.keys() & self.arriving.keys(), "an adapter is being read and copied at the same time"
        if self._tier is not None:
            self._tier.check_invariants()

    def _try_stage(self, digest: str, found: FoundAdapter, upcoming: Set[str] = frozenset()) -> StagedAdapter | None:
        if self._tier is None or found.file is None:
            return None
        busy = upcoming | self._loading.keys()
        return self._tier.try_stage(digest, found.table, found.size_bytes, found.file, busy)

    def _finish(self, digest: str) -> None:
        """Move it from loading to `arriving`; if reading it failed, forget it and raise the error."""
        queued = self._loading.pop(digest).queued
        try:
            arrival = self.arriving[digest] = queued.result()
        except Exception:
            if self._tier is not None:
                self._tier.forget(digest)
            raise
        if self._tier is not None:
            self._tier.note_copied(digest, arrival.last)


def _has_arrived(arrival: Arrival) -> bool:
    return arrival.is_waited or arrival.last.query()
