"""`AdapterMemory` on a device: adapters arrive while steps run, read by a thread or copied from the host tier."""

from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event as Flag

import pytest
from loraserve_adapters.errors import AdapterError
from loraserve_adapters.file_state import FileState
from loraserve_adapters.packed import PackedAdapter
from torch import Tensor

from loraserve.engine.adapters import memory as adapter_memory
from loraserve.engine.adapters.host_tier import HostTier
from loraserve.engine.adapters.memory import MAX_POSTPONED, AdapterMemory
from loraserve.engine.adapters.transit import AdapterTransit
from loraserve.engine.device.accelerator import Event
from tests.support.host_accelerator import HostAccelerator
from tests.support.packed_adapters import UNIT, TinyAdapter, acquire, content, damage, make_adapter_memory

ONE, TWO, THREE = ADAPTERS = [TinyAdapter(1, 1), TinyAdapter(2, 2), TinyAdapter(3, 3)]
MakeMemory = Callable[..., AdapterMemory]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_memory, "UPLOAD_WAIT_S", 60)


@pytest.fixture
def make_memory(tmp_path: Path) -> MakeMemory:
    """Makes a memory that knows all three adapters; the host tier contains those that fit."""

    def make(num_units: int, host_tier_units: int = 0) -> AdapterMemory:
        memory = make_adapter_memory(num_units, accelerator=HostAccelerator(), host_tier_units=host_tier_units)
        for adapter in ADAPTERS:
            memory.add(adapter.digest, str(adapter.write(tmp_path)))
        if host_tier_units:
            wait_for_fillings(memory)
        return memory

    return make


def transit_of(memory: AdapterMemory) -> AdapterTransit:
    return memory._transit


def tier_of(memory: AdapterMemory) -> HostTier:
    tier = transit_of(memory)._tier
    assert tier is not None
    return tier


def staged(memory: AdapterMemory) -> set[TinyAdapter]:
    return {adapter for adapter in ADAPTERS if adapter.digest in tier_of(memory)._staged}


def wait_for_fillings(memory: AdapterMemory) -> None:
    wait([found.filling for found in tier_of(memory)._staged.values() if found.filling is not None])


def use(memory: AdapterMemory, adapter_slot: int, adapter: TinyAdapter) -> list[float]:
    """The values that a step with the adapter reads."""
    arrivals = memory.arrivals([adapter_slot])
    if arrivals is not None:
        arrivals.before_group(0)
    return content(memory, adapter_slot, adapter.num_units)


def load(memory: AdapterMemory, adapter: TinyAdapter) -> None:
    """Use and release the adapter."""
    adapter_slot = acquire(memory, adapter)
    assert use(memory, adapter_slot, adapter) == [adapter.value]
    memory.release(adapter.digest)


@dataclass(slots=True)
class Reading:
    begun: Flag = field(default_factory=Flag)
    """Reading a held adapter has begun."""
    may_go_on: Flag = field(default_factory=Flag)
    done: list[TinyAdapter] = field(default_factory=list)


def watch_reading(memory: AdapterMemory, *held: TinyAdapter) -> Reading:
    """Records reads of payloads from now on; those of the held adapters wait until they `may_go_on`."""
    reading = Reading()
    read_verified = memory._files.read_verified

    def read(digest: str, path: Path) -> PackedAdapter:
        adapter = next(adapter for adapter in ADAPTERS if adapter.digest == digest)
        if adapter in held:
            reading.begun.set()
            assert reading.may_go_on.wait(60)
        reading.done.append(adapter)
        return read_verified(digest, path)

    memory._files.read_verified = read
    return reading


# ---- on a CPU


@pytest.fixture
def cpu_memory(tmp_path: Path) -> AdapterMemory:
    """It knows all three adapters, of which a thread loads all but the smallest."""
    memory = make_adapter_memory(4, background_bytes=TWO.size_bytes)
    for adapter in ADAPTERS:
        memory.add(adapter.digest, str(adapter.write(tmp_path)))
    return memory


def test_on_a_cpu_steps_go_on_while_a_large_adapter_is_read(cpu_memory: AdapterMemory) -> None:
    reading = watch_reading(cpu_memory, TWO)
    cpu_memory.prefetch(ONE.digest)
    cpu_memory.prefetch(TWO.digest)
    assert reading.begun.wait(60)
    assert cpu_memory.try_acquire(TWO.digest) is None
    assert not cpu_memory.has_news()
    small = cpu_memory.try_acquire(ONE.digest)
    assert small is not None
    assert reading.done == [ONE]
    assert use(cpu_memory, small, ONE) == [1]
    reading.may_go_on.set()
    assert use(cpu_memory, acquire(cpu_memory, TWO), TWO) == [2]
    cpu_memory.settle_uploads()
    assert cpu_memory.arrivals([small]) is None


def test_on_a_cpu_a_large_adapter_that_cannot_be_read_is_reported_once(
    cpu_memory: AdapterMemory, tmp_path: Path
) -> None:
    damage(TWO.write(tmp_path))
    assert cpu_memory.try_acquire(TWO.digest) is None
    with pytest.raises(AdapterError, match="sha256"):
        acquire(cpu_memory, TWO)
    TWO.write(tmp_path)
    assert use(cpu_memory, acquire(cpu_memory, TWO), TWO) == [2]


# ---- from files


def test_an_adapter_cannot_be_acquired_before_its_file_is_read(make_memory: MakeMemory) -> None:
    memory = make_memory(8)
    reading = watch_reading(memory, TWO)
    assert memory.try_acquire(TWO.digest) is None
    assert not memory.is_resident(TWO.digest)
    memory.check_invariants({})
    reading.may_go_on.set()
    assert use(memory, acquire(memory, TWO), TWO) == [2]
    assert memory.is_resident(TWO.digest)
    memory.check_invariants({TWO.digest: 1})
    assert memory.num_loads == 1


def test_a_step_that_does_not_wait_for_an_adapter_reads_other_values(make_memory: MakeMemory) -> None:
    """Otherwise the tests here would prove nothing."""
    memory = make_memory(8)
    memory.table.arena.zero_()
    adapter_slot = acquire(memory, TWO)
    assert content(memory, adapter_slot, TWO.num_units) == [0]
    assert use(memory, adapter_slot, TWO) == [2]


def test_only_steps_that_use_an_adapter_wait_for_it_and_only_once(make_memory: MakeMemory) -> None:
    memory = make_memory(8, host_tier_units=8)
    one, two = (memory.try_acquire(adapter.digest) for adapter in (ONE, TWO))
    assert one is not None
    assert two is not None
    assert memory.arrivals([-1]) is None
    arrivals = memory.arrivals([-1, two])
    assert arrivals is not None
    arrivals.before_all()
    assert memory.arrivals([two]) is None
    assert memory.arrivals([one, two]) is not None


def test_a_prefetched_adapter_can_be_acquired_at_once(make_memory: MakeMemory) -> None:
    memory = make_memory(8)
    memory.prefetch(TWO.digest)
    memory.wait_for_upload()
    adapter_slot = memory.try_acquire(TWO.digest)
    assert adapter_slot is not None
    assert use(memory, adapter_slot, TWO) == [2]


@pytest.mark.parametrize("host_tier_units", [0, 8])
def test_prefetching_evicts_nothing(make_memory: MakeMemory, host_tier_units: int) -> None:
    memory = make_memory(3, host_tier_units)
    load(memory, TWO)
    memory.settle_uploads()
    memory.prefetch(THREE.digest)
    assert list(memory.resident) == [TWO.digest]
    assert memory.num_evictions == 0


@pytest.mark.parametrize("host_tier_units", [0, 8])
def test_a_prefetched_adapter_that_was_never_acquired_makes_room_for_another(
    make_memory: MakeMemory, host_tier_units: int
) -> None:
    memory = make_memory(3, host_tier_units)
    memory.prefetch(TWO.digest)
    assert use(memory, acquire(memory, THREE), THREE) == [3]
    assert list(memory.resident) == [THREE.digest]
    memory.check_invariants({THREE.digest: 1})


def test_has_news_reports_a_finished_load_and_its_copies_until_they_are_settled(make_memory: MakeMemory) -> None:
    memory = make_memory(3)
    with held_thread(memory):
        memory.settle_uploads()
        assert memory.try_acquire(ONE.digest) is None
        assert not memory.has_news()
    for _ in range(2):  # first its copies are queued, then they are complete
        memory.wait_for_upload()
        assert memory.has_news()
        memory.settle_uploads()
    assert not memory.has_news()


def test_waiting_requests_do_not_evict_each_others_adapters(make_memory: MakeMemory) -> None:
    """Each file has been read before the other adapter's turn."""
    memory = make_memory(3)
    found: list[int | None] = []
    for _ in range(3):
        memory.settle_uploads()
        found = []
        for adapter in (TWO, THREE):
            found.append(memory.try_acquire(adapter.digest))
            memory.wait_for_upload()
    assert found[0] is not None
    assert memory.num_loads == 1


def test_compaction_waits_until_adapters_in_transit_have_arrived(make_memory: MakeMemory) -> None:
    memory = make_memory(7)
    acquire(memory, ONE)
    kept = acquire(memory, TWO)
    memory.release(ONE.digest)
    assert memory.try_acquire(THREE.digest) is None  # its extent ends one unit before the arena does
    memory.remove(ONE.digest)
    memory._compact(2 * UNIT)
    assert content(memory, kept, 2) == [2]
    assert use(memory, acquire(memory, THREE), THREE) == [3]


@pytest.mark.parametrize("host_tier_units", [0, 8])
def test_a_damaged_file_raises_an_error_and_takes_no_memory(
    make_memory: MakeMemory, tmp_path: Path, host_tier_units: int
) -> None:
    memory = make_memory(8, host_tier_units)
    memory.remove(TWO.digest)
    path = TWO.write(tmp_path)
    damage(path)
    memory.add(TWO.digest, str(path))
    with pytest.raises(AdapterError):
        acquire(memory, TWO)
    assert memory.used_bytes == 0
    memory.check_invariants({})
    TWO.write(tmp_path)
    assert use(memory, acquire(memory, TWO), TWO) == [2]


def test_a_load_that_failed_between_two_rounds_raises_its_error_once(make_memory: MakeMemory, tmp_path: Path) -> None:
    memory = make_memory(8)
    damage(TWO.write(tmp_path))
    for _ in range(2):
        assert memory.try_acquire(TWO.digest) is None
        memory.wait_for_upload()
        memory.settle_uploads()
        assert memory.used_bytes == 0
        with pytest.raises(AdapterError, match="does not match its sha256"):
            memory.try_acquire(TWO.digest)


def test_a_failure_between_two_rounds_is_not_reported_if_the_file_was_replaced(
    make_memory: MakeMemory, tmp_path: Path
) -> None:
    memory = make_memory(8)
    damage(TWO.write(tmp_path))
    assert memory.try_acquire(TWO.digest) is None
    memory.wait_for_upload()
    memory.settle_uploads()
    TWO.write(tmp_path)
    assert use(memory, acquire(memory, TWO), TWO) == [2]


def test_a_failure_within_a_round_is_not_reported_if_the_file_was_replaced(
    make_memory: MakeMemory, tmp_path: Path
) -> None:
    memory = make_memory(8)
    damage(TWO.write(tmp_path))
    assert memory.try_acquire(TWO.digest) is None
    memory.wait_for_upload()
    TWO.write(tmp_path)
    assert memory.try_acquire(TWO.digest) is None
    assert use(memory, acquire(memory, TWO), TWO) == [2]
    memory.check_invariants({TWO.digest: 1})


def test_a_file_whose_size_changes_while_it_is_loaded_raises_an_error(make_memory: MakeMemory) -> None:
    memory = make_memory(8)
    with pytest.raises(AdapterError, match="changed while it was loaded"):
        memory._files.payload(TWO.digest, replace(memory._files[TWO.digest], size_bytes=TWO.size_bytes + 1))


@pytest.mark.parametrize("host_tier_units", [0, 8])
def test_removing_an_adapter_in_transit_frees_its_memory(make_memory: MakeMemory, host_tier_units: int) -> None:
    memory = make_memory(3, host_tier_units)
    memory.prefetch(TWO.digest)
    memory.remove(TWO.digest)
    assert memory.used_bytes == 0
    assert not memory.knows(TWO.digest)
    memory.check_invariants({})
    assert use(memory, acquire(memory, THREE), THREE) == [3], "what was on its way has reached another's extent"


# ---- from the host tier


def test_the_first_use_of_an_added_adapter_finds_it_in_the_host_tier(make_memory: MakeMemory) -> None:
    memory = make_memory(8, host_tier_units=8)
    reading = watch_reading(memory)
    adapter_slot = memory.try_acquire(TWO.digest)
    assert adapter_slot is not None
    memory.check_invariants({TWO.digest: 1})
    assert use(memory, adapter_slot, TWO) == [2]
    assert reading.done == []


def test_an_evicted_adapter_is_reloaded_without_reading_its_file(make_memory: MakeMemory) -> None:
    memory = make_memory(3, host_tier_units=8)
    for adapter in (TWO, THREE):
        load(memory, adapter)
    reading = watch_reading(memory)
    for adapter in (TWO, THREE, TWO):
        load(memory, adapter)
    assert reading.done == []
    assert (memory.num_loads, memory.num_evictions, memory.num_reloads) == (5, 4, 3)


def test_a_first_use_waits_for_a_filling_that_has_started(make_memory: MakeMemory, tmp_path: Path) -> None:
    memory = make_memory(8, host_tier_units=8)
    memory.remove(TWO.digest)
    reading = watch_reading(memory, TWO)
    memory.add(TWO.digest, str(TWO.write(tmp_path)))
    assert reading.begun.wait(60)
    assert memory.try_acquire(TWO.digest) is None
    memory.check_invariants({})
    reading.may_go_on.set()
    assert use(memory, acquire(memory, TWO), TWO) == [2]
    assert reading.done == [TWO]


def test_a_first_use_does_not_wait_for_the_fillings_of_other_adapters(make_memory: MakeMemory, tmp_path: Path) -> None:
    memory = make_memory(8, host_tier_units=8)
    for adapter in (ONE, TWO):
        memory.remove(adapter.digest)
    reading = watch_reading(memory, ONE)
    for adapter in (ONE, TWO):
        memory.add(adapter.digest, str(adapter.write(tmp_path)))
    assert use(memory, acquire(memory, TWO), TWO) == [2]
    assert reading.done == [TWO]
    reading.may_go_on.set()
    load(memory, ONE)
    assert reading.done == [TWO, ONE], "each is read once"


def test_a_file_that_changed_is_read_again(make_memory: MakeMemory, tmp_path: Path) -> None:
    memory = make_memory(3, host_tier_units=8)
    reading = watch_reading(memory)
    TWO.write(tmp_path)
    load(memory, TWO)
    assert reading.done == [TWO]
    load(memory, THREE)
    assert reading.done == [TWO]
    damage(TWO.write(tmp_path))
    with pytest.raises(AdapterError) as caught:
        acquire(memory, TWO)
    assert caught.value.code == "bad_packed_file"
    (tmp_path / f"{TWO.digest}.packed").unlink()
    with pytest.raises(AdapterError) as caught:
        acquire(memory, TWO)
    assert caught.value.code == "missing_file"
    assert staged(memory) == {ONE, THREE}
    memory.check_invariants({})


def test_a_first_use_replaces_adapters_in_the_tier_but_adding_does_not(make_memory: MakeMemory) -> None:
    memory = make_memory(8, host_tier_units=3)
    assert staged(memory) == {ONE, TWO}
    load(memory, THREE)
    assert staged(memory) == {THREE}
    memory.check_invariants({})


def test_an_adapter_too_large_for_the_tier_is_loaded_without_it(make_memory: MakeMemory) -> None:
    memory = make_memory(8, host_tier_units=2)
    load(memory, THREE)
    assert THREE not in staged(memory)
    memory.check_invariants({})


def test_an_adapter_is_not_evicted_while_it_arrives(make_memory: MakeMemory) -> None:
    memory = make_memory(3, host_tier_units=8)
    assert memory.try_acquire(TWO.digest) is not None
    memory.release(TWO.digest)
    memory.check_invariants({})
    assert memory.try_acquire(THREE.digest) is None
    assert list(memory.resident) == [TWO.digest]
    assert use(memory, acquire(memory, THREE), THREE) == [3]
    assert list(memory.resident) == [THREE.digest]


def test_an_arriving_adapter_can_be_acquired_again(make_memory: MakeMemory) -> None:
    memory = make_memory(3, host_tier_units=8)
    slots = [memory.try_acquire(TWO.digest), memory.try_acquire(TWO.digest)]
    memory.release(TWO.digest)
    memory.release(TWO.digest)
    slots.append(memory.try_acquire(TWO.digest))
    assert None not in slots
    assert len(set(slots)) == 1
    memory.check_invariants({TWO.digest: 1})
    assert memory.num_loads == 1


def test_tier_memory_is_not_reused_while_it_is_being_copied(make_memory: MakeMemory) -> None:
    memory = make_memory(8, host_tier_units=3)
    slots = [memory.try_acquire(adapter.digest) for adapter in (ONE, TWO)]
    assert memory.try_acquire(THREE.digest) is None  # its file is read now, into whatever memory is available
    memory.wait_for_upload()
    for adapter_slot, adapter in zip(slots, (ONE, TWO), strict=True):
        assert adapter_slot is not None
        assert use(memory, adapter_slot, adapter) == [adapter.value]


def test_removed_adapters_leave_the_tier(make_memory: MakeMemory) -> None:
    memory = make_memory(8, host_tier_units=8)
    for adapter in ADAPTERS:
        memory.remove(adapter.digest)
    assert tier_of(memory).used_bytes == 0
    memory.check_invariants({})


def test_an_adapter_whose_file_is_missing_when_it_is_added_is_not_filled(make_memory: MakeMemory) -> None:
    memory = make_memory(8, host_tier_units=8)
    memory.remove(TWO.digest)
    packed = memory._files.read(ONE.digest, memory._files[ONE.digest].path)
    file: FileState | None = None
    transit_of(memory).prefill(TWO.digest, packed, file, lambda: packed.payload)
    assert staged(memory) == {ONE, THREE}


# ---- while steps run


def device_of(memory: AdapterMemory) -> HostAccelerator:
    device = transit_of(memory)._copies
    assert isinstance(device, HostAccelerator)
    return device


@contextmanager
def held_thread(memory: AdapterMemory) -> Iterator[None]:
    """The upload thread reads nothing during the block, which must not wait for it."""
    may_read = Flag()
    held = transit_of(memory)._uploader._thread.submit(may_read.wait, 10)
    yield
    assert not held.done(), "somebody waited"
    may_read.set()


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Work of the side stream, in order: the events that it waits for, and "copy"."""
    order: list[object] = []
    copy_to_device, wait_for = HostAccelerator.copy_to_device, HostAccelerator.wait_for

    def copy(device: HostAccelerator, destination: Tensor, source: Tensor) -> None:
        if device.side.is_current:
            order.append("copy")
        copy_to_device(device, destination, source)

    def wait_on_side(device: HostAccelerator, event: Event) -> None:
        if device.side.is_current:
            order.append(event)
        wait_for(device, event)

    monkeypatch.setattr(HostAccelerator, "copy_to_device", copy)
    monkeypatch.setattr(HostAccelerator, "wait_for", wait_on_side)
    return order


@pytest.mark.parametrize("host_tier_units", [0, 8])
def test_copies_wait_for_the_last_step_that_reads_the_memory_they_overwrite(
    make_memory: MakeMemory, order: list[object], host_tier_units: int
) -> None:
    memory = make_memory(3, host_tier_units)
    acquire(memory, TWO)
    memory.settle_uploads()
    memory.release(TWO.digest)
    last_read = device_of(memory).events[-1]
    memory.settle_uploads()
    device_of(memory).record()
    order.clear()
    acquire(memory, THREE)
    assert order == [last_read, "copy"]


def test_copies_to_free_memory_wait_for_no_step(make_memory: MakeMemory, order: list[object]) -> None:
    memory = make_memory(8, host_tier_units=8)
    load(memory, TWO)
    device_of(memory).record()
    order.clear()
    memory.prefetch(THREE.digest)
    assert order == ["copy"]


def test_copies_into_space_freed_by_compaction_wait_for_the_moves(make_memory: MakeMemory, order: list[object]) -> None:
    memory = make_memory(6, host_tier_units=8)
    load(memory, ONE)
    load(memory, TWO)
    memory.remove(ONE.digest)
    order.clear()
    memory._compact(3 * UNIT)
    moved = device_of(memory).events[-1]
    memory.prefetch(THREE.digest)
    assert order == [moved, "copy"]


def test_no_file_is_read_while_no_room_can_be_made(make_memory: MakeMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = make_memory(3)
    acquire(memory, TWO)
    monkeypatch.setattr(memory._files, "read", lambda *_: pytest.fail("read"))
    assert memory.try_acquire(THREE.digest) is None


def test_an_adapter_above_max_arriving_bytes_is_acquired_only_if_it_is_in_use_or_has_arrived(
    make_memory: MakeMemory,
) -> None:
    memory = make_memory(8, host_tier_units=8)
    assert memory.try_acquire(TWO.digest, TWO.size_bytes) is not None
    assert memory.try_acquire(TWO.digest, 0) is not None, "a step waits for it anyway"
    assert memory.try_acquire(THREE.digest, THREE.size_bytes - 1) is None
    memory.check_invariants({TWO.digest: 2})
    use(memory, memory._arena.residents[THREE.digest].adapter_slot, THREE)
    assert memory.try_acquire(THREE.digest, 0) is not None, "it is there"


def test_is_resident_is_false_until_the_adapter_is_acquired(make_memory: MakeMemory) -> None:
    """The first request counts as the one that loads it, even if it was prefetched."""
    memory = make_memory(8, host_tier_units=8)
    memory.prefetch(TWO.digest)
    assert list(memory.resident) == [TWO.digest]
    assert not memory.is_resident(TWO.digest)
    load(memory, TWO)
    assert memory.is_resident(TWO.digest)


def test_prefetching_reads_into_the_host_tier_if_the_arena_has_no_room(make_memory: MakeMemory) -> None:
    memory = make_memory(3, host_tier_units=3)
    acquire(memory, TWO)
    assert staged(memory) == {ONE, TWO}
    memory.settle_uploads()
    memory.settle_uploads()
    reading = watch_reading(memory)
    memory.prefetch(THREE.digest)
    wait_for_fillings(memory)
    assert staged(memory) == {THREE}
    assert reading.done == [THREE]
    memory.release(TWO.digest)
    assert use(memory, acquire(memory, THREE), THREE) == [3]
    assert reading.done == [THREE]


@pytest.mark.parametrize("is_read_first", [False, True])
def test_compaction_is_postponed_while_files_are_read_but_not_indefinitely(
    make_memory: MakeMemory, tmp_path: Path, is_read_first: bool
) -> None:
    memory = make_memory(6)
    slow, waiting = TinyAdapter(4, 2), TinyAdapter(5, 2)
    for adapter in (slow, waiting):
        memory.add(adapter.digest, str(adapter.write(tmp_path)))
    load(memory, ONE)
    kept = acquire(memory, TWO)
    memory.remove(ONE.digest)
    with held_thread(memory):
        assert memory.try_acquire(slow.digest) is None
        for _ in range(1 if is_read_first else MAX_POSTPONED):
            assert memory.try_acquire(waiting.digest) is None
            assert waiting.digest not in memory.resident
            assert memory.resident[TWO.digest] == (256, 512), "moved, for which running sequences would wait"
    if is_read_first:
        memory.wait_for_upload()
        memory.settle_uploads()
    memory.try_acquire(waiting.digest)
    assert waiting.digest in memory.resident
    assert use(memory, kept, TWO) == [2]
    for adapter in (slow, waiting):
        assert use(memory, acquire(memory, adapter), adapter) == [adapter.value]


def test_a_compaction_waits_for_no_load_that_has_not_begun(make_memory: MakeMemory, tmp_path: Path) -> None:
    memory = make_memory(9)
    queued, other, waiting = TinyAdapter(4, 2), TinyAdapter(5, 2), TinyAdapter(6, 3)
    for adapter in (queued, other, waiting):
        memory.add(adapter.digest, str(adapter.write(tmp_path)))
    load(memory, ONE)
    kept = acquire(memory, TWO)
    memory.remove(ONE.digest)
    with held_thread(memory):
        for adapter in (queued, other):
            assert memory.try_acquire(adapter.digest) is None
        for _ in range(MAX_POSTPONED + 1):
            assert memory.try_acquire(waiting.digest) is None
        assert {*memory.resident} == {TWO.digest, waiting.digest}
        assert memory.num_loads == 3, "loads that were cancelled count"
        memory.check_invariants({TWO.digest: 1})
    assert use(memory, kept, TWO) == [2]
    for adapter in (waiting, queued, other):
        load(memory, adapter)


def test_removing_an_adapter_does_not_wait_for_the_files_of_other_adapters(make_memory: MakeMemory) -> None:
    memory = make_memory(8)
    with held_thread(memory):
        memory.prefetch(TWO.digest)
        memory.remove(TWO.digest)
    assert memory.used_bytes == 0
    memory.check_invariants({})
    load(memory, THREE)


def test_wait_for_upload_returns_after_its_time_limit(make_memory: MakeMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = make_memory(8)
    monkeypatch.setattr(adapter_memory, "UPLOAD_WAIT_S", 0)
    with held_thread(memory):
        memory.prefetch(TWO.digest)
        memory.wait_for_upload()
        assert memory.try_acquire(TWO.digest) is None
