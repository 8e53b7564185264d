from collections.abc import Callable
from pathlib import Path
from threading import Event as Flag

import numpy as np
import pytest
import torch
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.packed import ALIGNMENT_BYTES

from loraserve.engine.adapter_memory import AdapterMemory
from loraserve.engine.adapter_upload import AdapterUploader
from tests.support.host_accelerator import HostAccelerator
from tests.support.packed_adapters import LAYOUT, TinyAdapter, content, damage

ONE, TWO, THREE = TinyAdapter(1, 1), TinyAdapter(2, 2), TinyAdapter(3, 3)


@pytest.fixture
def accelerator() -> HostAccelerator:
    return HostAccelerator()


@pytest.fixture
def make_memory(accelerator: HostAccelerator, tmp_path: Path) -> Callable[[int], AdapterMemory]:
    """Of so many units, knowing all three adapters."""

    def make(num_units: int) -> AdapterMemory:
        memory = AdapterMemory(
            num_groups=1,
            num_members=1,
            layout_fingerprint=LAYOUT,
            size_bytes=num_units * ALIGNMENT_BYTES,
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_resident=8,
            accelerator=accelerator,
        )
        for adapter in (ONE, TWO, THREE):
            memory.add(adapter.digest, str(adapter.write(tmp_path)))
        return memory

    return make


def acquire(memory: AdapterMemory, adapter: TinyAdapter) -> int:
    adapter_slot = memory.try_acquire(adapter.digest)
    while adapter_slot is None:
        memory.wait_for_upload()
        memory.settle_uploads()
        adapter_slot = memory.try_acquire(adapter.digest)
    return adapter_slot


def test_pieces_arrive_in_their_places_after_the_steps_queued_before(accelerator: HostAccelerator) -> None:
    payload = np.random.default_rng(0).integers(0, 256, 1000, np.uint8)
    destination = torch.zeros(1000, dtype=torch.uint8)
    upload = AdapterUploader(accelerator, piece_bytes=64).start(destination, lambda: payload)
    behind = accelerator.events[0]
    upload.wait()
    upload.finish()
    assert torch.equal(destination, torch.from_numpy(payload))
    assert accelerator.waited_for == [behind, accelerator.events[-1]]


def test_an_adapter_is_not_there_before_its_upload_is_done(make_memory: Callable[[int], AdapterMemory]) -> None:
    memory = make_memory(8)
    may_read = Flag()
    read_verified = memory._read_verified
    memory._read_verified = lambda *args: (may_read.wait(), read_verified(*args))[1]  # type: ignore[method-assign]
    assert memory.try_acquire(TWO.digest) is None
    assert not memory.is_resident(TWO.digest)
    memory.check_invariants({})
    may_read.set()
    assert content(memory, acquire(memory, TWO), 2) == [2]
    assert memory.is_resident(TWO.digest)
    memory.check_invariants({TWO.digest: 1})
    assert memory.num_loads == 1


def test_a_prefetched_adapter_is_there_at_once(make_memory: Callable[[int], AdapterMemory]) -> None:
    memory = make_memory(8)
    memory.prefetch(TWO.digest)
    memory.wait_for_upload()
    adapter_slot = memory.try_acquire(TWO.digest)
    assert adapter_slot is not None
    assert content(memory, adapter_slot, 2) == [2]


def test_prefetching_evicts_nothing(make_memory: Callable[[int], AdapterMemory]) -> None:
    memory = make_memory(3)
    acquire(memory, TWO)
    memory.release(TWO.digest)
    memory.prefetch(THREE.digest)
    assert memory.resident == [TWO.digest]
    assert memory.num_evictions == 0


def test_an_adapter_nobody_waits_for_any_more_makes_room(make_memory: Callable[[int], AdapterMemory]) -> None:
    memory = make_memory(3)
    assert memory.try_acquire(TWO.digest) is None
    assert content(memory, acquire(memory, THREE), 3) == [3]
    assert memory.resident == [THREE.digest]
    memory.check_invariants({THREE.digest: 1})


def test_those_who_wait_do_not_evict_each_others_adapters(make_memory: Callable[[int], AdapterMemory]) -> None:
    """Both uploads are done before the other's turn."""
    memory = make_memory(3)
    for _ in range(3):
        memory.settle_uploads()
        found = []
        for adapter in (TWO, THREE):
            found.append(memory.try_acquire(adapter.digest))
            memory.wait_for_upload()
    assert found[0] is not None
    assert memory.num_loads == 1


def test_adapters_on_their_way_are_there_before_they_are_moved(make_memory: Callable[[int], AdapterMemory]) -> None:
    memory = make_memory(6)
    acquire(memory, ONE)
    kept = acquire(memory, TWO)
    memory.release(ONE.digest)
    assert memory.try_acquire(THREE.digest) is None  # ends with the arena
    memory.remove(ONE.digest)
    memory._compact()
    assert content(memory, kept, 2) == [2]
    assert content(memory, acquire(memory, THREE), 3) == [3]


def test_a_damaged_file_is_told_and_takes_no_memory(
    make_memory: Callable[[int], AdapterMemory], tmp_path: Path
) -> None:
    memory = make_memory(8)
    damage(TWO.write(tmp_path))
    with pytest.raises(AdapterError):
        acquire(memory, TWO)
    assert memory.used_bytes == 0
    memory.check_invariants({})


def test_forgetting_an_adapter_on_its_way_frees_its_extent(make_memory: Callable[[int], AdapterMemory]) -> None:
    memory = make_memory(8)
    memory.prefetch(TWO.digest)
    memory.remove(TWO.digest)
    assert memory.used_bytes == 0
    assert not memory.knows(TWO.digest)
    memory.check_invariants({})
