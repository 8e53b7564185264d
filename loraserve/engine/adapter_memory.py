"""Adapters in the arena: loaded at first use, reference-counted, evicted least recently used first.

The arena is one flat tensor; an adapter takes exactly its packed bytes, whatever its ranks. When free space suffices
but is scattered, the arena is compacted: adapters move and their table rows follow, between steps.
"""

import time
import warnings
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.packed import ALIGNMENT_BYTES, PackedAdapter
from loraserve_adapters.packed_file import FileState, file_state, read_packed
from loraserve_kernels.adapter_table import MAX_LORA_RANK, AdapterTable
from torch import Tensor

from loraserve.engine.accelerator import Accelerator
from loraserve.engine.adapter_upload import AdapterUploader, Upload
from loraserve.engine.arena import Extents

SETTLED_NS = 1_000_000_000
"""A file that was written so long before it was verified shows by its times when it is written again."""


@dataclass(slots=True)
class _Resident:
    adapter_slot: int
    start: int
    """First element in the arena."""
    size: int
    """Elements."""
    offset_a: np.ndarray
    """Relative to `start`, -1 = absent."""
    offset_b: np.ndarray
    offset_bias: np.ndarray
    num_references: int = 0

    @property
    def has_bias(self) -> bool:
        return bool((self.offset_bias >= 0).any())


class AdapterMemory:
    """All adapters the engine knows, by digest, and which of them are in the arena."""

    def __init__(
        self,
        *,
        num_groups: int,
        num_members: int,
        layout_fingerprint: str,
        size_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
        max_resident: int = 1024,
        accelerator: Accelerator | None = None,
    ) -> None:
        """size_bytes: of the arena; its memory is touched only as adapters come.

        accelerator: of the device; adapters then arrive while steps go on, and `try_acquire` has none before.
        """
        self._layout_fingerprint = layout_fingerprint
        self._element_bytes = dtype.itemsize
        alignment = ALIGNMENT_BYTES // self._element_bytes
        num_elements = size_bytes // ALIGNMENT_BYTES * alignment
        self._extents = Extents(num_elements)
        self._paths: dict[str, Path] = {}
        self._verified: dict[str, FileState] = {}
        """States of packed files in which the payload had its sha256."""
        self._resident: dict[str, _Resident] = {}
        self._evictable: OrderedDict[str, None] = OrderedDict()  # least recently used first
        self._uploader = None if accelerator is None else AdapterUploader(accelerator)
        self._loading: dict[str, Upload] = {}
        """Of the resident ones; neither referenced nor evictable."""
        self._free_slots = list(range(max_resident - 1, -1, -1))
        self.num_loads = 0
        self.num_evictions = 0
        self.table = AdapterTable(
            arena=_aligned_empty(num_elements, dtype, device),
            offset_a=torch.zeros((max_resident, num_groups), dtype=torch.int64, device=device),
            offset_b=torch.zeros((max_resident, num_members), dtype=torch.int64, device=device),
            lora_rank=torch.zeros((max_resident, num_members), dtype=torch.int32, device=device),
            scaling=torch.zeros((max_resident, num_members), dtype=torch.float32, device=device),
            offset_bias=torch.full((max_resident, num_members), -1, dtype=torch.int64, device=device),
            offset_alignment=alignment,
        )

    @property
    def size_bytes(self) -> int:
        return self._extents.size * self._element_bytes

    @property
    def used_bytes(self) -> int:
        return (self._extents.size - self._extents.num_free) * self._element_bytes

    @property
    def resident(self) -> list[str]:
        return list(self._resident)

    @property
    def extents(self) -> list[tuple[int, int]]:
        """(offset, size) in bytes of each of `resident`."""
        size = self._element_bytes
        return [(resident.start * size, resident.size * size) for resident in self._resident.values()]

    def knows(self, digest: str) -> bool:
        return digest in self._paths

    def add(self, digest: str, packed_path: str) -> None:
        """Make `digest` loadable from a packed file. Raises `AdapterError`."""
        packed = self._read(digest, Path(packed_path))
        if packed.size_bytes > self.size_bytes:
            raise AdapterError(
                "too_large",
                f"adapter {digest[:12]} takes {packed.size_bytes} bytes, the adapter memory has {self.size_bytes}: "
                "raise --adapter-memory-bytes",
            )
        if packed.max_lora_rank > MAX_LORA_RANK:
            raise AdapterError(
                "rank_too_large",
                f"adapter {digest[:12]} has rank {packed.max_lora_rank}, at most {MAX_LORA_RANK} is accepted",
            )
        self._paths[digest] = Path(packed_path)

    def remove(self, digest: str) -> None:
        """Forget an unreferenced adapter and free its extent."""
        self._paths.pop(digest, None)
        self._verified.pop(digest, None)
        if digest in self._loading:
            with suppress(AdapterError):  # then it is evicted
                self._arrive(digest)
        if digest in self._resident:
            self._evict(digest)

    def is_resident(self, digest: str) -> bool:
        """Whether it can be acquired without loading or waiting."""
        return digest in self._resident and digest not in self._loading

    def prefetch(self, digest: str) -> None:
        """Start loading an adapter that will be acquired, where it disturbs nobody: beside the steps, in free space."""
        if self._uploader is None or digest in self._resident or not self._free_slots:
            return
        with suppress(AdapterError):  # `try_acquire` will tell
            packed = self._read(digest, self._paths[digest])
            start = self._extents.try_allocate(packed.size_bytes // self._element_bytes)
            if start is not None:
                self._load(digest, packed, start)

    def settle_uploads(self) -> None:
        """From now on what has arrived can be evicted, as whoever it was loaded for may be gone.

        NOTE: once before each round of acquiring. Within a round, those who wait would evict each other's in turn.
        """
        for digest in [digest for digest, upload in self._loading.items() if upload.is_done()]:
            with suppress(AdapterError):  # the next attempt to acquire it tells
                self._arrive(digest)

    def wait_for_upload(self) -> None:
        """Until the oldest upload under way, if there is one, is done."""
        for upload in self._loading.values():
            upload.wait()
            return

    def try_acquire(self, digest: str) -> int | None:
        """Take a reference, loading if needed; returns the adapter slot, or None when no room can be made now.

        None too while it is on its way to a GPU. Raises `AdapterError` when the packed file is missing or corrupt.
        """
        resident = self._resident.get(digest)
        if resident is None:
            resident = self._try_load(digest)
            if resident is None:
                return None
        if digest in self._loading:
            if not self._loading[digest].is_done():
                return None
            self._arrive(digest)
        resident.num_references += 1
        self._evictable.pop(digest, None)
        return resident.adapter_slot

    def release(self, digest: str) -> None:
        resident = self._resident[digest]
        assert resident.num_references > 0, f"adapter {digest[:12]} released without a reference"
        resident.num_references -= 1
        if resident.num_references == 0:
            self._evictable[digest] = None

    def check_invariants(self, references: dict[str, int]) -> None:
        """`references`: running sequences by digest. Raises AssertionError naming what does not hold."""
        held = {digest: r.num_references for digest, r in self._resident.items() if r.num_references}
        assert held == references, f"adapter references {held} differ from the running sequences' {references}"
        assert not held.keys() & self._loading.keys(), "an adapter is referenced before it is there"
        unreferenced = set(self._resident) - set(held) - set(self._loading)
        assert set(self._evictable) == unreferenced, "an evictable adapter is referenced"
        used = sum(resident.size for resident in self._resident.values())
        assert used + self._extents.num_free == self._extents.size, "arena space was lost"
        spans = sorted((r.start, r.start + r.size) for r in self._resident.values())
        assert all(a[1] <= b[0] for a, b in pairwise(spans)), "adapters overlap in the arena"

    def _try_load(self, digest: str) -> _Resident | None:
        read = self._read_verified if self._uploader is None else self._read
        packed = read(digest, self._paths[digest])
        start = self._try_make_room(packed.size_bytes // self._element_bytes)
        return None if start is None else self._load(digest, packed, start)

    def _load(self, digest: str, packed: PackedAdapter, start: int) -> _Resident:
        """start: of an extent of its size. With an uploader it is verified on the way."""
        resident = _Resident(
            self._free_slots.pop(),
            start,
            packed.size_bytes // self._element_bytes,
            packed.offset_a,
            packed.offset_b,
            packed.offset_bias,
        )
        arena = self.table.arena
        extent = arena[start : start + resident.size]
        if self._uploader is None:
            extent.copy_(_as_tensor(packed.payload).view(arena.dtype))
            self._evictable[digest] = None
        else:
            path = self._paths[digest]
            self._loading[digest] = self._uploader.start(
                extent.view(torch.uint8), lambda: self._read_verified(digest, path).payload
            )
        self.table.lora_rank[resident.adapter_slot] = torch.from_numpy(packed.lora_rank.astype(np.int32))
        self.table.scaling[resident.adapter_slot] = torch.from_numpy(packed.scaling.astype(np.float32))
        self._write_offsets(resident)
        self._resident[digest] = resident
        self.table.num_biased += resident.has_bias
        self.num_loads += 1
        return resident

    def _arrive(self, digest: str) -> None:
        """Wait for its upload. Raises `AdapterError`, and the adapter is gone, when that has failed."""
        upload = self._loading.pop(digest)
        self._evictable[digest] = None
        try:
            upload.finish()
        except AdapterError:
            self._evict(digest)
            raise

    def _read_verified(self, digest: str, path: Path) -> PackedAdapter:
        """The payload is hashed once, and again when its file has changed.

        20 MiB in the page cache are hashed in 11 ms and copied in 2 (EPYC), while every running sequence waits.
        """
        now_ns, state = time.time_ns(), file_state(path)
        if state is not None and state == self._verified.get(digest):
            return self._read(digest, path)
        packed = self._read(digest, path, verify=True)
        if state is not None and now_ns - state.newest_ns > SETTLED_NS:
            self._verified[digest] = state
        return packed

    def _read(self, digest: str, path: Path, *, verify: bool = False) -> PackedAdapter:
        packed = read_packed(path, verify=verify, layout_fingerprint=self._layout_fingerprint)
        if packed.digest != digest:
            raise AdapterError("digest_mismatch", f"packed file holds adapter {packed.digest[:12]}, not {digest[:12]}")
        return packed

    def _try_make_room(self, size: int) -> int | None:
        evictable = sum(self._resident[digest].size for digest in self._evictable)
        if size > self._extents.num_free + evictable or not (self._free_slots or self._evictable):
            return None
        while self._extents.num_free < size or not self._free_slots:
            self._evict(next(iter(self._evictable)))
            self.num_evictions += 1
        start = self._extents.try_allocate(size)
        if start is None:
            self._compact()
            start = self._extents.try_allocate(size)
        return start

    def _evict(self, digest: str) -> None:
        resident = self._resident.pop(digest)
        assert resident.num_references == 0, f"adapter {digest[:12]} is in use"
        del self._evictable[digest]
        self.table.num_biased -= resident.has_bias
        self._extents.free(resident.start, resident.size)
        self._free_slots.append(resident.adapter_slot)

    def _compact(self) -> None:
        for upload in self._loading.values():
            with suppress(AdapterError):  # told when it is acquired
                upload.finish()
        arena = self.table.arena
        end = 0
        for resident in sorted(self._resident.values(), key=lambda r: r.start):
            if resident.start != end:
                source = arena[resident.start : resident.start + resident.size]
                overlaps = end + resident.size > resident.start
                arena[end : end + resident.size].copy_(source.clone() if overlaps else source)
                resident.start = end
                self._write_offsets(resident)
            end += resident.size
        self._extents.reset(end)

    def _write_offsets(self, resident: _Resident) -> None:
        row = resident.adapter_slot
        self.table.offset_a[row] = torch.from_numpy(resident.offset_a + resident.start)
        self.table.offset_b[row] = torch.from_numpy(resident.offset_b + resident.start)
        # Unlike the others, an absent bias is told by its offset.
        bias = np.where(resident.offset_bias >= 0, resident.offset_bias + resident.start, -1)
        self.table.offset_bias[row] = torch.from_numpy(bias)


def _as_tensor(payload: np.ndarray) -> Tensor:
    """Of the same memory, which may be read only."""
    with warnings.catch_warnings():
        # torch cannot mark a tensor as read-only and says so.
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(payload)


def _aligned_empty(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialized and, on a CPU, not yet backed by memory; starts at a multiple of ALIGNMENT_BYTES."""
    spare = ALIGNMENT_BYTES // dtype.itemsize
    buffer = torch.empty(num_elements + spare, dtype=dtype, device=device)
    skip = -buffer.data_ptr() % ALIGNMENT_BYTES // dtype.itemsize
    return buffer[skip : skip + num_elements]
