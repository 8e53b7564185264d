"""Which adapters are in the arena, and where: each has an extent of exactly its size and a row of the table."""

from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise

from loraserve_adapters.packed import PackedTable
from torch import Tensor

from loraserve.engine.adapters.extents import Extents
from loraserve.engine.adapters.rows import AdapterRows

MAX_COPIED = 1 << 24
"""Elements that are copied through a temporary tensor at a time: 32 MiB of bfloat16."""


@dataclass(slots=True)
class Resident:
    table: PackedTable
    adapter_slot: int
    start: int
    """First element in the arena."""
    size: int
    """Elements."""
    num_references: int = 0
    was_acquired: bool = False
    has_arrived: bool = False
    """Whether its copies have ended; until then it must stay where it is."""

    @property
    def has_bias(self) -> bool:
        return bool((self.table.offset_bias >= 0).any())


class AdapterArena:
    """By digest; sizes in elements. Adapters are evicted and moved only on request.

    One is evictable while it is not referenced and has arrived.
    """

    def __init__(self, rows: AdapterRows, num_slots: int) -> None:
        self._rows = rows
        self.table = rows.table
        self.extents = Extents(len(self.table.arena))
        self.residents: dict[str, Resident] = {}
        self.num_in_use = 0
        """Adapters that are referenced."""
        self.num_ever_used = 0
        """Elements from the arena's start up to the highest end that an extent ever had."""
        self._evictable: OrderedDict[str, None] = OrderedDict()
        """Least recently used first."""
        self._evictable_size = 0
        """Elements of all evictable adapters."""
        self._free_slots = list(range(num_slots - 1, -1, -1))

    @property
    def by_last_use(self) -> list[str]:
        """All adapters, least recently used first; those that cannot be evicted now are last."""
        return [*self._evictable, *(digest for digest in self.residents if digest not in self._evictable)]

    def can_make_room(self, size: int) -> bool:
        """Whether there is room after evicting all that can be evicted and compacting the rest."""
        has_slot = bool(self._free_slots or self._evictable)
        return size <= self.extents.num_free + self._evictable_size and has_slot

    def next_victim(self, size: int) -> str | None:
        """The adapter to evict next to make room; None once there is room, even scattered. Requires `can_make_room`."""
        has_room = self.extents.num_free >= size and self._free_slots
        return None if has_room else next(iter(self._evictable))

    def try_allocate(self, size: int) -> int | None:
        """Start of an extent to `enter`; None if no free one is large enough, or no slot is free."""
        return self.extents.try_allocate(size) if self._free_slots else None

    def enter(self, digest: str, table: PackedTable, start: int, size: int) -> Resident:
        """Write its row of the table. The caller fills the extent and says so with `note_arrived`."""
        resident = Resident(table, self._free_slots.pop(), start, size)
        self.num_ever_used = max(self.num_ever_used, start + size)
        self._rows.write(resident.adapter_slot, table)
        self._rows.place(resident.adapter_slot, start, table)
        self.residents[digest] = resident
        self.table.num_biased += resident.has_bias
        return resident

    def extent(self, resident: Resident) -> Tensor:
        return self.table.arena[resident.start : resident.start + resident.size]

    def note_arrived(self, digest: str) -> None:
        """Its copies have ended. If it is not referenced, it becomes the most recently used."""
        resident = self.residents[digest]
        assert not resident.has_arrived, f"adapter {digest[:12]} has arrived twice"
        resident.has_arrived = True
        if resident.num_references == 0:
            self._let_evict(digest, resident)

    def acquire(self, digest: str) -> int:
        """Take a reference; returns the adapter slot."""
        resident = self.residents[digest]
        self.num_in_use += resident.num_references == 0
        resident.num_references += 1
        resident.was_acquired = True
        self._keep(digest, resident)
        return resident.adapter_slot

    def release(self, digest: str) -> bool:
        """Drop a reference; returns whether it was the last one, so that the adapter is now the most recently used."""
        resident = self.residents[digest]
        assert resident.num_references > 0, f"adapter {digest[:12]} released without a reference"
        resident.num_references -= 1
        if resident.num_references > 0:
            return False
        self.num_in_use -= 1
        if resident.has_arrived:
            self._let_evict(digest, resident)
        return True

    def evict(self, digest: str) -> None:
        resident = self.residents.pop(digest)
        assert resident.num_references == 0, f"adapter {digest[:12]} is in use"
        self._keep(digest, resident)
        self.table.num_biased -= resident.has_bias
        self.extents.free(resident.start, resident.size)
        self._rows.clear(resident.adapter_slot)
        self._free_slots.append(resident.adapter_slot)

    def compact(self, size: int) -> None:
        """Move adapters together until `size` is free in one piece, moving as little as possible."""
        start, end = self.extents.cheapest_span(size)
        place = start
        for resident in sorted(self.residents.values(), key=lambda r: r.start):
            if start <= resident.start < end:
                if resident.start != place:
                    self._copy_down(resident.start, place, resident.size)
                    resident.start = place
                    self._rows.place(resident.adapter_slot, place, resident.table)
                place += resident.size
        self.extents.join(start, end)

    def check_invariants(self) -> None:
        """Raises AssertionError naming what does not hold."""
        used = sum(resident.size for resident in self.residents.values())
        assert used + self.extents.num_free == self.extents.size, "arena space was lost"
        spans = sorted((r.start, r.start + r.size) for r in self.residents.values())
        assert all(a[1] <= b[0] for a, b in pairwise(spans)), "adapters overlap in the arena"
        num_held = sum(resident.num_references > 0 for resident in self.residents.values())
        assert self.num_in_use == num_held, f"num_in_use is {self.num_in_use}, but {num_held} adapters are in use"
        evictable = {digest for digest, r in self.residents.items() if r.num_references == 0 and r.has_arrived}
        assert self._evictable.keys() == evictable, "an evictable adapter is referenced or on its way"
        size = sum(self.residents[digest].size for digest in evictable)
        assert self._evictable_size == size, f"_evictable_size is {self._evictable_size}, but {size} can be evicted"

    def _let_evict(self, digest: str, resident: Resident) -> None:
        """It becomes the most recently used."""
        self._evictable[digest] = None
        self._evictable_size += resident.size

    def _keep(self, digest: str, resident: Resident) -> None:
        """A no-op unless it is evictable."""
        if digest in self._evictable:
            del self._evictable[digest]
            self._evictable_size -= resident.size

    def _copy_down(self, source: int, destination: int, size: int) -> None:
        """Copy within the arena; if source and destination overlap, in pieces, so that only one piece needs temporary
        memory."""
        arena, distance = self.table.arena, source - destination
        piece = max(distance, MAX_COPIED)
        for offset in range(0, size, piece):
            length = min(piece, size - offset)
            values = arena[source + offset : source + offset + length]
            arena[destination + offset : destination + offset + length].copy_(
                values.clone() if length > distance else values
            )
