"""Adapters in the arena: loaded at first use, reference-counted, evicted least recently used first.

The arena is one flat tensor; an adapter takes exactly its packed bytes, whatever its ranks. When free space suffices
but is scattered, the arena is compacted: adapters move and their table rows follow, between steps.

On a GPU they arrive while steps run, and on a CPU those that are not small; see `AdapterTransit`. NOTE: an adapter on
its way is neither evicted nor moved.
"""

from collections.abc import Callable, Collection, Iterable, Set
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.file_state import file_state
from loraserve_adapters.packed import ALIGNMENT_BYTES, PackedTable
from loraserve_kernels.adapter_table import MAX_LORA_RANK
from torch import Tensor

from loraserve.engine.adapters.arena import AdapterArena, Resident
from loraserve.engine.adapters.arrival import StepArrivals
from loraserve.engine.adapters.files import AdapterFile, AdapterFiles
from loraserve.engine.adapters.rows import AdapterRows
from loraserve.engine.adapters.transit import AdapterTransit, FoundAdapter
from loraserve.engine.adapters.upload import Read
from loraserve.engine.config import MAX_RESIDENT_ADAPTERS
from loraserve.engine.device.accelerator import Accelerator
from loraserve.engine.device.host_copies import HostCopies
from loraserve.engine.pages_ahead import PagesAhead

FinishAdapter = Callable[[PackedTable, Tensor], None]
"""See `CausalModel.finish_adapter`."""

UPLOAD_WAIT_S = 0.005
"""The longest that a request arriving meanwhile, perhaps for the base model, waits for a file that others need."""
BACKGROUND_BYTES = 8 << 20
"""On a CPU, smaller adapters are loaded between two steps, which takes 20 ms for this many bytes that were not read
before (two Xeon cores). Larger ones would delay every running sequence for longer."""
TOUCH_BYTES = 256 << 10
"""Granularity in which the arena's memory is touched ahead."""
AHEAD_BYTES = 256 << 20
"""How much of the arena is touched beyond the adapters loaded so far: the size of some large ones."""
MAX_POSTPONED = 16
"""Consecutive attempts to make room that may give up because adapters would have to be moved while others are read."""

MAX_EVICTED_KNOWN = 32_768
"""Evicted adapters that are remembered, so that loading one counts as a reload; they take 5 MB."""


class AdapterMemory:
    """All adapters that the engine knows, by digest, and which of them are in the arena."""

    def __init__(
        self,
        *,
        num_groups: int,
        num_members: int,
        layout_fingerprint: str,
        size_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
        max_resident: int = MAX_RESIDENT_ADAPTERS,
        accelerator: Accelerator | None = None,
        host_tier_bytes: int = 0,
        finish: FinishAdapter | None = None,
        background_bytes: int | None = None,
        absorbed_members: Collection[int] = (),
    ) -> None:
        """size_bytes: of the arena, whose memory is touched only as adapters are loaded.

        accelerator: of the device; None on a CPU. Adapters arrive while steps run, on a CPU those with at least
        background_bytes, None = `BACKGROUND_BYTES`: see `try_acquire` and `arrivals`.
        host_tier_bytes: page-locked memory for adapters, in addition to the arena; with an accelerator only.
        absorbed_members: of up-projections whose adapters hold for a whole sequence: see `BaseModule.is_absorbed`.
        finish: called with each adapter that `is_finished_by_base` once it is in the arena; None = there are none.
        """
        self.host_tier_bytes = host_tier_bytes
        self._element_bytes = dtype.itemsize
        num_elements = size_bytes // ALIGNMENT_BYTES * (ALIGNMENT_BYTES // self._element_bytes)
        self._files = AdapterFiles(layout_fingerprint)
        self._absorbed_members = [*absorbed_members]
        on_a_cpu = BACKGROUND_BYTES if background_bytes is None else background_bytes
        self._background_bytes = on_a_cpu if accelerator is None else 0
        copies = HostCopies() if accelerator is None else accelerator
        self._transit = AdapterTransit(copies, host_tier_bytes, self._element_bytes)
        """Contains only residents. Until they arrive they are not evictable and, while loading, not referenced."""
        self._finish = finish
        self._unfinished: set[str] = set()
        """Residents on their way that are still as they were packed and must be finished there."""
        self._num_postponed = 0
        self.num_loads = 0
        self.num_evictions = 0
        self.num_reloads = 0
        """Loads of adapters that had been evicted."""
        self._evicted: dict[str, None] = {}
        """Oldest first; those not loaded again since, including adapters that were removed and may be added again."""
        rows = AdapterRows(
            num_elements=num_elements,
            num_rows=max_resident,
            num_groups=num_groups,
            num_members=num_members,
            dtype=dtype,
            device=device,
            accelerator=accelerator,
        )
        self._arena = AdapterArena(rows, max_resident)
        self.table = rows.table
        self._touch_elements = TOUCH_BYTES // self._element_bytes
        num_blocks = num_elements // self._touch_elements
        blocks = self.table.arena[: num_blocks * self._touch_elements].view(num_blocks, self._touch_elements)
        self._pages = PagesAhead([blocks] if num_blocks else [], AHEAD_BYTES)
        self._transit.follow_steps()  # queued steps may still read this memory's former contents

    @property
    def size_bytes(self) -> int:
        return self._arena.extents.size * self._element_bytes

    @property
    def used_bytes(self) -> int:
        extents = self._arena.extents
        return (extents.size - extents.num_free) * self._element_bytes

    @property
    def num_in_use(self) -> int:
        """Adapters that are referenced."""
        return self._arena.num_in_use

    @property
    def resident(self) -> dict[str, tuple[int, int]]:
        """(offset, size) in bytes by digest. Least recently used first; those that cannot be evicted now are last."""
        residents, size = self._arena.residents, self._element_bytes
        ordered = self._arena.by_last_use
        return {digest: (residents[digest].start * size, residents[digest].size * size) for digest in ordered}

    def knows(self, digest: str) -> bool:
        return digest in self._files

    def add(self, digest: str, packed_path: str) -> None:
        """Make `digest` loadable from a packed file. Raises `AdapterError`.

        If the host tier has room, the file is read into it in the background.
        """
        path = Path(packed_path)
        file = file_state(path)
        packed = self._files.read(digest, path)
        if packed.size_bytes > self.size_bytes:
            raise AdapterError(
                "too_large",
                f"adapter {digest[:12]} takes {packed.size_bytes} bytes, but the adapter memory has {self.size_bytes}: "
                "raise --adapter-memory-bytes",
            )
        if packed.table.max_lora_rank > MAX_LORA_RANK:
            raise AdapterError(
                "rank_too_large",
                f"adapter {digest[:12]} has rank {packed.table.max_lora_rank}; at most {MAX_LORA_RANK} is accepted",
            )
        if packed.table.invocation_token_ids and packed.table.lora_rank[self._absorbed_members].any():
            raise AdapterError(
                "unsupported_option",
                f"adapter {digest[:12]} is activated within a prompt, which is not possible for its LoRA on the "
                "up-projection of latent attention",
            )
        known = AdapterFile(path, packed.size_bytes, packed.table.invocation_token_ids, packed.table.head)
        self._files.add(digest, known)
        self._transit.prefill(digest, packed, file, lambda: self._files.payload(digest, known))

    def invocation_of(self, digest: str) -> tuple[int, ...]:
        """See `AdapterFile`. Requires `knows`."""
        return self._files[digest].invocation_token_ids

    def is_classifier(self, digest: str) -> bool:
        """Whether it has a head of its own. Requires `knows`."""
        return self._files[digest].head is not None

    def head_of(self, digest: str) -> Tensor:
        """The head of a referenced classifier: float32 [num_labels, hidden_size], there once a step that waits for its
        `arrivals` has run."""
        head = self._files[digest].head
        assert head is not None, f"adapter {digest[:12]} is not a classifier"
        start = self._arena.residents[digest].start + head.offset
        size = head.num_labels * head.hidden_size * torch.float32.itemsize // self._element_bytes
        return self.table.arena[start : start + size].view(torch.float32).view(head.num_labels, head.hidden_size)

    def remove(self, digest: str) -> None:
        """Forget an unreferenced adapter and free its extent."""
        self._transit.forget(digest)
        self._files.forget(digest)
        if digest in self._arena.residents:
            self._evict(digest)

    def is_resident(self, digest: str) -> bool:
        """Whether it has been acquired since it was loaded, and is still in the arena."""
        resident = self._arena.residents.get(digest)
        return resident is not None and resident.was_acquired

    def has_place(self, digest: str) -> bool:
        """Whether it is in the arena or on its way there."""
        return digest in self._arena.residents

    def is_loading(self, digest: str) -> bool:
        """Whether its copies are not queued yet. Ends with `settle_uploads` or `try_acquire`."""
        return self._transit.is_loading(digest)

    def is_in_use(self, digest: str) -> bool:
        """Whether it is referenced."""
        resident = self._arena.residents.get(digest)
        return resident is not None and resident.num_references > 0

    def can_make_room(self, digest: str) -> bool:
        """False: `try_acquire` would return None, because it is not there and does not fit beside those that must
        stay."""
        if digest in self._arena.residents:
            return True
        return self._arena.can_make_room(self._files[digest].size_bytes // self._element_bytes)

    def prefetch(self, digest: str, wanted: Set[str] = frozenset()) -> None:
        """Start loading an adapter that will be acquired, while steps run.

        It is loaded into free space of the arena or, without any, only into the host tier: nothing is evicted for it.
        wanted: others that will be acquired, too; the tier does not forget them for this one, which comes after them.
        """
        if digest in self._arena.residents or self._is_loaded_at_once(digest):
            return
        with suppress(AdapterError):  # `try_acquire` will report it
            found = self._find(digest)
            size = found.size_bytes // self._element_bytes
            start = self._arena.try_allocate(size)
            if start is not None:
                self._start_load(digest, found, start)
            else:
                upcoming = wanted - self._arena.residents.keys()
                self._transit.stage(digest, found, self._reader(digest, found), upcoming)

    def settle_uploads(self) -> None:
        """Make adapters that have arrived evictable, because the requests that they were loaded for may be gone.

        NOTE: once before each round of acquiring. Within a round, waiting requests would evict each other's adapters.
        """
        for digest in self._transit.finish_loading():
            self._evict(digest)
        for digest in self._transit.take_arrived():
            self._arena.note_arrived(digest)

    def has_news(self) -> bool:
        """Whether an adapter has progressed since `settle_uploads`, so that more can be acquired now than then."""
        return self._transit.has_news()

    def wait_for_upload(self) -> None:
        """Wait until the oldest load under way, if there is one, has progressed, or for `UPLOAD_WAIT_S`."""
        self._transit.wait_for_oldest(UPLOAD_WAIT_S)

    def touch_ahead(self) -> bool:
        """Touch some memory that no adapter has used yet, in idle time; False if none is left to touch now."""
        return self._pages.touch_next(-(-self._arena.num_ever_used // self._touch_elements))

    def arrivals(self, adapter_slots: Iterable[int]) -> StepArrivals | None:
        """Copies that are not complete and that a step with these slots must wait for; None = there are none."""
        if not self._transit.arriving:
            return None
        slots = set(adapter_slots)
        found = [
            arrival
            for digest, arrival in self._transit.arriving.items()
            if not arrival.is_waited and self._arena.residents[digest].adapter_slot in slots
        ]
        return StepArrivals(found) if found else None

    def try_acquire(self, digest: str, max_arriving_bytes: int | None = None) -> int | None:
        """Take a reference, loading if needed; returns the adapter slot, or None when no room can be made now.

        Also None while its file is read by a thread; once its copies are queued, steps with it wait for its `arrivals`.
        Also None, for an adapter that must be finished, until all of it has arrived.
        max_arriving_bytes: also None while the adapter is being copied, if it is larger and not in use.
        Raises `AdapterError` when the packed file is missing or corrupt.
        """
        resident = self._arena.residents.get(digest)
        if resident is not None and self._transit.finish_failed(digest):
            self._evict(digest)
            resident = None  # loading it reports the error, unless the file has changed
        if resident is None:
            resident = self._try_load(digest)
        if resident is None or self.is_loading(digest):
            return None
        is_large = max_arriving_bytes is not None and resident.size * self._element_bytes > max_arriving_bytes
        needs_all = digest in self._unfinished or (is_large and resident.num_references == 0)
        if needs_all and self._transit.is_being_copied(digest):
            return None
        self._ensure_finished(digest, resident)
        return self._arena.acquire(digest)

    def release(self, digest: str) -> None:
        if self._arena.release(digest):
            self._transit.note_released(digest)

    def check_invariants(self, references: dict[str, int]) -> None:
        """`references`: running sequences by digest. Raises AssertionError naming what does not hold."""
        held = {digest: r.num_references for digest, r in self._arena.residents.items() if r.num_references}
        assert held == references, f"adapter references {held} differ from the running sequences' {references}"
        self._transit.check_invariants()
        loading = self._transit.loading
        assert not held.keys() & loading, "an adapter is referenced before its copies are queued"
        on_their_way = loading | self._transit.arriving.keys()
        assert on_their_way <= self._arena.residents.keys(), "an arriving adapter has no extent"
        not_arrived = {digest for digest, r in self._arena.residents.items() if not r.has_arrived}
        assert not_arrived == on_their_way, "an adapter has arrived but is on its way, or has not and is not"
        self._arena.check_invariants()

    def _try_load(self, digest: str) -> Resident | None:
        if not self.can_make_room(digest):
            return None  # before its file is opened
        if not self._is_loaded_at_once(digest):
            found = self._find(digest)
            start = self._try_make_room(found.size_bytes // self._element_bytes)
            return None if start is None else self._start_load(digest, found, start)
        packed = self._files.read_verified(digest, self._files[digest].path)
        start = self._try_make_room(packed.size_bytes // self._element_bytes)
        if start is None:
            return None
        resident = self._enter(digest, packed.table, packed.size_bytes, start)
        np.copyto(self._arena.extent(resident).view(torch.uint8).numpy(), packed.payload)
        self._ensure_finished(digest, resident)
        self._arena.note_arrived(digest)
        return resident

    def _is_loaded_at_once(self, digest: str) -> bool:
        return self._files[digest].size_bytes < self._background_bytes

    def _find(self, digest: str) -> FoundAdapter:
        path = self._files[digest].path
        return self._transit.find(digest, path, lambda: self._files.read(digest, path))

    def _reader(self, digest: str, found: FoundAdapter) -> Read:
        file = AdapterFile(self._files[digest].path, found.size_bytes)
        return lambda: self._files.payload(digest, file)

    def _start_load(self, digest: str, found: FoundAdapter, start: int) -> Resident:
        """start: of an extent of the adapter's size."""
        resident = self._enter(digest, found.table, found.size_bytes, start)
        destination = self._arena.extent(resident).view(torch.uint8)
        self._transit.start(digest, found, destination, self._reader(digest, found))
        return resident

    def _enter(self, digest: str, table: PackedTable, size_bytes: int, start: int) -> Resident:
        self.num_loads += 1
        if digest in self._evicted:
            del self._evicted[digest]
            self.num_reloads += 1
        if table.is_finished_by_base:
            self._unfinished.add(digest)
        return self._arena.enter(digest, table, start, size_bytes // self._element_bytes)

    def _ensure_finished(self, digest: str, resident: Resident) -> None:
        """Finish it for steps queued from now on. The adapter is there, or the main stream waits for all of it."""
        if digest in self._unfinished:
            assert self._finish is not None, "an adapter must be finished, but there is no `finish`"
            self._finish(resident.table, self._arena.extent(resident))
            self._unfinished.remove(digest)

    def _try_make_room(self, size: int) -> int | None:
        if not self._arena.can_make_room(size):
            return None
        while (victim := self._arena.next_victim(size)) is not None:
            self._evict(victim)
            self._note_evicted(victim)
        start = self._arena.try_allocate(size)
        if start is None and self._may_compact():
            self._compact(size)
            start = self._arena.try_allocate(size)
        return start

    def _note_evicted(self, digest: str) -> None:
        self.num_evictions += 1
        self._evicted[digest] = None
        if len(self._evicted) > MAX_EVICTED_KNOWN:
            del self._evicted[next(iter(self._evicted))]

    def _may_compact(self) -> bool:
        """Not while files are read, which all running sequences would wait for; but refused at most `MAX_POSTPONED`
        times in a row."""
        if not self._transit.loading or self._num_postponed == MAX_POSTPONED:
            self._num_postponed = 0
            return True
        self._num_postponed += 1
        return False

    def _evict(self, digest: str) -> None:
        self._arena.evict(digest)
        self._unfinished.discard(digest)
        self._transit.note_evicted(digest)

    def _compact(self, size: int) -> None:
        for digest in self._transit.cancel_queued():  # to be loaded at their next attempt
            self._evict(digest)
            self.num_loads -= 1
        self._transit.wait_for_all()
        self._arena.compact(size)
        self._transit.follow_steps()
