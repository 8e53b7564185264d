import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from loraserve_adapters.errors import AdapterError
from loraserve_kernels.adapter_table import MAX_LORA_RANK

from loraserve.engine.adapters import arena as adapter_arena
from loraserve.engine.adapters import files as adapter_files
from loraserve.engine.adapters import memory as adapter_memory
from loraserve.engine.adapters.files import AdapterFiles
from loraserve.engine.adapters.memory import AdapterMemory
from tests.support.memory_pages import can_populate, give_back, resident_pages
from tests.support.packed_adapters import UNIT, TinyAdapter, acquire, content, damage, make_adapter_memory

ADAPTERS = [TinyAdapter(value, num_units) for value, num_units in enumerate((1, 2, 3, 1, 2, 8), start=1)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("packed")
    return {adapter.digest: adapter.write(folder) for adapter in ADAPTERS}


def add(memory: AdapterMemory, paths: dict[str, Path], *adapters: TinyAdapter) -> None:
    for adapter in adapters:
        memory.add(adapter.digest, str(paths[adapter.digest]))


def load(memory: AdapterMemory, adapter: TinyAdapter) -> None:
    """Leaves the adapter resident and unreferenced."""
    assert memory.try_acquire(adapter.digest) is not None
    memory.release(adapter.digest)


@pytest.mark.skipif(not can_populate(), reason="the system cannot touch pages by request")
def test_idle_time_touches_memory_for_adapters_to_come(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As far ahead of those that were loaded as `AHEAD_BYTES`; with huge pages, up to 2 MiB further."""
    monkeypatch.setattr(adapter_memory, "AHEAD_BYTES", 2 << 20)
    adapters = [TinyAdapter(value, 512) for value in range(1, 25)]  # 3 MiB in total
    memory = make_adapter_memory(16 << 12, max_resident=24)
    arena = memory.table.arena.view(16, -1)
    give_back(arena)

    def touched() -> list[bool]:
        while memory.touch_ahead():
            pass
        return [all(resident_pages(part)[1:-1]) for part in arena]

    assert touched()[:2] == [True] * 2
    assert not any(touched()[5:])
    slots = []
    for adapter in adapters:
        memory.add(adapter.digest, str(adapter.write(tmp_path)))
        slots.append(acquire(memory, adapter))
    assert touched()[:5] == [True] * 5
    assert not any(touched()[8:])
    assert [content(memory, slot, 512) for slot in slots] == [[adapter.value] for adapter in adapters]


def test_an_adapter_takes_exactly_its_packed_bytes_once_it_is_acquired(paths: dict[str, Path]) -> None:
    memory = make_adapter_memory(8)
    add(memory, paths, ADAPTERS[2])
    assert memory.knows(ADAPTERS[2].digest)
    assert not memory.is_resident(ADAPTERS[2].digest)
    assert memory.used_bytes == 0
    adapter_slot = memory.try_acquire(ADAPTERS[2].digest)
    assert adapter_slot is not None
    assert memory.used_bytes == 3 * 256
    assert content(memory, adapter_slot, 3) == [3]
    assert memory.table.scaling[adapter_slot].tolist() == [1.5]


def test_every_extent_starts_at_an_aligned_address(paths: dict[str, Path]) -> None:
    memory = make_adapter_memory(8)
    add(memory, paths, *ADAPTERS[:3])
    for adapter in ADAPTERS[:3]:
        adapter_slot = memory.try_acquire(adapter.digest)
        assert adapter_slot is not None
        assert memory.table.arena[memory.table.offset_a[adapter_slot, 0] :].data_ptr() % 256 == 0


def test_evicts_the_least_recently_used_adapter(paths: dict[str, Path]) -> None:
    memory = make_adapter_memory(4)
    one, two, _, other_one, other_two, _ = ADAPTERS
    add(memory, paths, one, two, other_one, other_two)
    for adapter in (one, two, other_one, one, other_two):
        load(memory, adapter)
    assert set(memory.resident) == {other_one.digest, one.digest, other_two.digest}
    assert (memory.num_loads, memory.num_evictions) == (4, 1)


def test_only_loads_of_previously_evicted_adapters_count_as_reloads(paths: dict[str, Path]) -> None:
    """Loads of many new adapters that are tried once, as after the upload of a folder, do not."""
    memory = make_adapter_memory(2)
    one, two, _, other_one, other_two, _ = ADAPTERS
    add(memory, paths, one, two, other_one, other_two)
    for adapter in (two, other_two, one, other_one):
        load(memory, adapter)
    assert (memory.num_loads, memory.num_evictions, memory.num_reloads) == (4, 2, 0)
    for adapter in (one, two, two, other_two, two):
        load(memory, adapter)
    assert (memory.num_loads, memory.num_evictions, memory.num_reloads) == (7, 6, 3)
    # Also if it was removed and added again, as when more adapters are in use than the engine knows at once.
    memory.remove(other_two.digest)
    add(memory, paths, other_two)
    load(memory, other_two)
    assert memory.num_reloads == 4


def test_loading_an_adapter_that_was_removed_without_eviction_is_not_a_reload(paths: dict[str, Path]) -> None:
    memory = make_adapter_memory(2)
    for _ in range(2):
        add(memory, paths, ADAPTERS[1])
        load(memory, ADAPTERS[1])
        memory.remove(ADAPTERS[1].digest)
    assert (memory.num_loads, memory.num_evictions, memory.num_reloads) == (2, 0, 0)


def test_the_oldest_evictions_are_forgotten_beyond_a_limit(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraserve.engine.adapters.memory.MAX_EVICTED_KNOWN", 2)
    memory = make_adapter_memory(2)
    one, two, _, _, other_two, _ = ADAPTERS
    add(memory, paths, one, two, other_two)
    for adapter in (two, other_two, one, two):
        load(memory, adapter)
    assert (memory.num_evictions, memory.num_reloads) == (3, 0)
    load(memory, one)
    assert memory.num_reloads == 1


def test_resident_lists_the_least_recently_used_first_and_adapters_in_use_last(paths: dict[str, Path]) -> None:
    memory = make_adapter_memory(4)
    one, two, _, other_one, other_two, _ = ADAPTERS
    add(memory, paths, one, two, other_one, other_two)
    starts = {}
    for adapter in (one, two, other_one, one):
        load(memory, adapter)
        starts[adapter.digest] = memory.resident[adapter.digest]
    assert list(memory.resident) == [two.digest, other_one.digest, one.digest]
    assert memory.resident == starts
    memory.try_acquire(two.digest)
    assert list(memory.resident) == [other_one.digest, one.digest, two.digest]
    assert memory.resident == starts


def test_never_evicts_a_referenced_adapter(paths: dict[str, Path]) -> None:
    memory = make_adapter_memory(4)
    one, two, three = ADAPTERS[:3]
    add(memory, paths, one, two, three)
    adapter_slot = memory.try_acquire(two.digest)
    assert adapter_slot is not None
    load(memory, one)
    assert memory.try_acquire(three.digest) is None
    assert memory.is_resident(one.digest), "evicted though that could not make room"
    assert content(memory, adapter_slot, 2) == [2]
    memory.release(two.digest)
    assert memory.try_acquire(three.digest) is not None


def test_moves_adapters_together_when_free_space_is_scattered(paths: dict[str, Path]) -> None:
    memory = make_adapter_memory(5)
    one, two, _, other_one, _, _ = ADAPTERS
    big = ADAPTERS[2]
    add(memory, paths, one, two, other_one, big)
    load(memory, one)
    kept = memory.try_acquire(two.digest)
    load(memory, other_one)
    assert kept is not None
    adapter_slot = memory.try_acquire(big.digest)
    assert adapter_slot is not None
    assert content(memory, kept, 2) == [2]
    assert content(memory, adapter_slot, 3) == [3]
    assert memory.used_bytes == memory.size_bytes
    memory.check_invariants({two.digest: 1, big.digest: 1})


def test_compaction_moves_as_little_data_as_possible(paths: dict[str, Path]) -> None:
    memory = make_adapter_memory(9)
    one, two, three, other_one, other_two, _ = ADAPTERS
    add(memory, paths, one, two, three, other_one, other_two)
    slots = {adapter: acquire(memory, adapter) for adapter in (one, three, other_one, two, other_two)}
    for adapter in (one, other_one, other_two):
        memory.release(adapter.digest)
        memory.remove(adapter.digest)
    memory._compact(3 * UNIT)
    starts = {adapter: int(memory.table.offset_a[slots[adapter], 0]) // UNIT for adapter in (three, two)}
    assert starts == {three: 1, two: 4}
    memory.check_invariants({three.digest: 1, two.digest: 1})


@pytest.mark.parametrize("max_copied", [10, 100, 1000], ids=["pieces", "copied pieces", "one copied piece"])
def test_an_adapter_moved_by_less_than_its_size_keeps_its_values(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch, max_copied: int
) -> None:
    monkeypatch.setattr(adapter_arena, "MAX_COPIED", max_copied)
    memory = make_adapter_memory(10)
    one, large = ADAPTERS[0], ADAPTERS[5]
    add(memory, paths, one, large)
    acquire(memory, one)
    adapter_slot = acquire(memory, large)
    values = memory.table.arena[UNIT : 9 * UNIT].copy_(torch.arange(8 * UNIT)).clone()
    memory.release(one.digest)
    memory.remove(one.digest)
    memory._compact(2 * UNIT)
    assert int(memory.table.offset_a[adapter_slot, 0]) == 0
    assert torch.equal(memory.table.arena[: 8 * UNIT], values)


def test_loading_needs_a_free_slot_as_well_as_space(paths: dict[str, Path]) -> None:
    memory = make_adapter_memory(8, max_resident=2)
    one, two, three = ADAPTERS[:3]
    add(memory, paths, one, two, three)
    assert memory.try_acquire(one.digest) is not None
    assert memory.try_acquire(two.digest) is not None
    assert memory.try_acquire(three.digest) is None
    memory.release(one.digest)
    assert memory.try_acquire(three.digest) is not None
    assert not memory.is_resident(one.digest)


def test_whether_there_can_be_room_does_not_depend_on_looking_at_each_resident(paths: dict[str, Path]) -> None:
    memory = make_adapter_memory(8)
    add(memory, paths, *ADAPTERS[:3], ADAPTERS[5])
    for adapter in ADAPTERS[:3]:
        load(memory, adapter)
    arena = memory._arena
    residents, arena.residents = arena.residents, {}
    assert memory.can_make_room(ADAPTERS[5].digest)
    arena.residents = residents
    assert memory.try_acquire(ADAPTERS[0].digest) is not None
    assert not memory.can_make_room(ADAPTERS[5].digest)


def test_a_wrong_sum_of_what_can_be_evicted_is_found(paths: dict[str, Path]) -> None:
    memory = make_adapter_memory(8)
    add(memory, paths, ADAPTERS[2])
    load(memory, ADAPTERS[2])
    memory.check_invariants({})
    memory._arena._evictable_size += 1
    with pytest.raises(AssertionError, match=rf"_evictable_size is {3 * UNIT + 1}, but {3 * UNIT} can be evicted"):
        memory.check_invariants({})


def test_an_adapter_larger_than_the_arena_is_refused(paths: dict[str, Path]) -> None:
    memory = make_adapter_memory(7)
    with pytest.raises(AdapterError, match="takes 2048 bytes, but the adapter memory has 1792") as caught:
        add(memory, paths, ADAPTERS[5])
    assert caught.value.code == "too_large"
    assert not memory.knows(ADAPTERS[5].digest)


def test_a_rank_above_the_maximum_of_the_kernels_is_refused(tmp_path: Path) -> None:
    memory = make_adapter_memory(600)
    largest, too_large = TinyAdapter(1, MAX_LORA_RANK), TinyAdapter(1, MAX_LORA_RANK + 1)
    memory.add(largest.digest, str(largest.write(tmp_path)))
    with pytest.raises(AdapterError, match="has rank 513; at most 512 is accepted") as caught:
        memory.add(too_large.digest, str(too_large.write(tmp_path)))
    assert caught.value.code == "rank_too_large"
    assert not memory.knows(too_large.digest)


def test_a_file_of_another_adapter_is_refused(paths: dict[str, Path]) -> None:
    memory = make_adapter_memory(8)
    with pytest.raises(AdapterError) as caught:
        memory.add(ADAPTERS[0].digest, str(paths[ADAPTERS[1].digest]))
    assert caught.value.code == "digest_mismatch"


def test_a_file_for_another_base_model_is_refused(tmp_path: Path) -> None:
    memory = make_adapter_memory(8)
    with pytest.raises(AdapterError) as caught:
        memory.add(ADAPTERS[0].digest, str(ADAPTERS[0].write(tmp_path, "another layout")))
    assert caught.value.code == "layout_mismatch"


def test_a_file_damaged_after_it_was_added_is_rejected_at_load_until_it_is_replaced(tmp_path: Path) -> None:
    memory = make_adapter_memory(3)
    path = ADAPTERS[0].write(tmp_path)
    other = ADAPTERS[2].write(tmp_path)
    memory.add(ADAPTERS[0].digest, str(path))
    memory.add(ADAPTERS[2].digest, str(other))
    load(memory, ADAPTERS[2])
    damage(path)
    with pytest.raises(AdapterError) as caught:
        memory.try_acquire(ADAPTERS[0].digest)
    assert caught.value.code == "bad_packed_file"
    assert list(memory.resident) == [ADAPTERS[2].digest], "something was evicted for an adapter that cannot be loaded"
    path.unlink()
    with pytest.raises(AdapterError) as caught:
        memory.try_acquire(ADAPTERS[0].digest)
    assert caught.value.code == "missing_file"
    ADAPTERS[0].write(tmp_path)
    load(memory, ADAPTERS[0])
    memory.check_invariants({})


@pytest.fixture
def an_hour_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's files appear to have been written an hour ago."""
    later = SimpleNamespace(time_ns=lambda: time.time_ns() + 3600 * 10**9)
    monkeypatch.setattr(adapter_files, "time", later)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose payload was hashed."""
    names: list[str] = []
    read_packed = adapter_files.read_packed

    def read(path: Path, *, verify: bool, layout_fingerprint: str) -> object:
        if verify:
            names.append(path.stem)
        return read_packed(path, verify=verify, layout_fingerprint=layout_fingerprint)

    monkeypatch.setattr(adapter_files, "read_packed", read)
    return names


@pytest.mark.usefixtures("an_hour_later")
def test_an_unchanged_file_is_hashed_once(paths: dict[str, Path], hashed: list[str]) -> None:
    memory = make_adapter_memory(2)
    one, two = ADAPTERS[0], ADAPTERS[1]
    add(memory, paths, one, two)
    for adapter in (one, two, one, two):
        load(memory, adapter)
    assert (memory.num_loads, hashed) == (4, [one.digest, two.digest])
    memory.remove(one.digest)
    add(memory, paths, one)
    load(memory, one)
    assert hashed == [one.digest, two.digest, one.digest], "what was forgotten is hashed when it comes back"


@pytest.mark.usefixtures("an_hour_later")
def test_a_damaged_file_is_hashed_once_for_all_attempts_and_again_after_its_repair(
    tmp_path: Path, hashed: list[str]
) -> None:
    memory = make_adapter_memory(2)
    path = ADAPTERS[0].write(tmp_path)
    memory.add(ADAPTERS[0].digest, str(path))
    damage(path)
    for _ in range(3):
        with pytest.raises(AdapterError, match="does not match its sha256") as caught:
            memory.try_acquire(ADAPTERS[0].digest)
        assert caught.value.code == "bad_packed_file"
    assert hashed == [ADAPTERS[0].digest]
    ADAPTERS[0].write(tmp_path)
    load(memory, ADAPTERS[0])
    assert hashed == [ADAPTERS[0].digest] * 2


def test_a_file_just_written_is_hashed_again(tmp_path: Path, hashed: list[str]) -> None:
    memory = make_adapter_memory(2)
    one, two = ADAPTERS[0], ADAPTERS[1]
    for adapter in (one, two):
        memory.add(adapter.digest, str(adapter.write(tmp_path)))
    for adapter in (one, two, one):
        load(memory, adapter)
    assert hashed == [one.digest, two.digest, one.digest]


@pytest.mark.usefixtures("an_hour_later")
def test_a_file_damaged_after_it_was_hashed_is_rejected_at_its_next_load(tmp_path: Path) -> None:
    memory = make_adapter_memory(2)
    one, two = ADAPTERS[0], ADAPTERS[1]
    path = one.write(tmp_path)
    memory.add(one.digest, str(path))
    memory.add(two.digest, str(two.write(tmp_path)))
    load(memory, one)
    load(memory, two)
    before = path.stat()
    damage(path)
    # Two writes within one tick of the file system's clock have the same time.
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 10_000_000))
    with pytest.raises(AdapterError) as caught:
        memory.try_acquire(one.digest)
    assert caught.value.code == "bad_packed_file"
    assert list(memory.resident) == [two.digest]


def test_a_resident_adapter_does_not_need_its_file(tmp_path: Path) -> None:
    memory = make_adapter_memory(3)
    path = ADAPTERS[0].write(tmp_path)
    memory.add(ADAPTERS[0].digest, str(path))
    load(memory, ADAPTERS[0])
    path.unlink()
    load(memory, ADAPTERS[0])
    assert memory.num_loads == 1


def test_removing_a_referenced_adapter_is_a_bug(paths: dict[str, Path]) -> None:
    memory = make_adapter_memory(3)
    add(memory, paths, ADAPTERS[0])
    memory.try_acquire(ADAPTERS[0].digest)
    with pytest.raises(AssertionError, match="in use"):
        memory.remove(ADAPTERS[0].digest)


def test_ten_thousand_loads_leak_no_memory_and_no_slots(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = make_adapter_memory(4)
    add(memory, paths, *ADAPTERS[:5])
    files = {digest: memory._files.read(digest, path, verify=True) for digest, path in paths.items()}
    monkeypatch.setattr(AdapterFiles, "read", lambda self, digest, path, *, verify=False: files[digest])
    for i in range(10_000):
        load(memory, ADAPTERS[i * i % 5])
    memory.check_invariants({})
    for adapter in ADAPTERS[:5]:
        memory.remove(adapter.digest)
    assert memory.used_bytes == 0
    assert memory.resident == {}
    assert sorted(memory._arena._free_slots) == list(range(8))
    assert memory._arena.extents.try_allocate(memory._arena.extents.size) == 0


class AdapterMemoryMachine(RuleBasedStateMachine):
    """An arena of 8 units and 4 slots, for adapters of 1, 2, 3, 1, 2 and 8 units."""

    paths: dict[str, Path]

    def __init__(self) -> None:
        super().__init__()
        self.memory = make_adapter_memory(8, max_resident=4)
        self.references: dict[TinyAdapter, list[int]] = {}
        """The slots that `try_acquire` returned, one per reference."""
        self.known: set[TinyAdapter] = set()
        self.recency: list[TinyAdapter] = []
        """Unreferenced residents, least recently used first."""

    @rule(adapter=st.sampled_from(ADAPTERS))
    def add(self, adapter: TinyAdapter) -> None:
        self.memory.add(adapter.digest, str(self.paths[adapter.digest]))
        self.known.add(adapter)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        adapter = data.draw(st.sampled_from(sorted(self.known, key=lambda a: a.value)))
        was_resident = self.memory.is_resident(adapter.digest)
        held = [other for other in self.references if other != adapter]
        has_room = sum(other.num_units for other in held) + adapter.num_units <= 8 and len(held) < 4
        adapter_slot = self.memory.try_acquire(adapter.digest)
        assert (adapter_slot is not None) == (was_resident or has_room)
        if adapter_slot is not None:
            self.recency = [other for other in self.recency if other != adapter]
            evicted = [other for other in self.recency if not self.memory.is_resident(other.digest)]
            assert evicted == self.recency[: len(evicted)], "evicted out of order"
            self.recency = self.recency[len(evicted) :]
            self.references.setdefault(adapter, []).append(adapter_slot)

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        adapter = data.draw(st.sampled_from(sorted(self.references, key=lambda a: a.value)))
        self.references[adapter].pop()
        self.memory.release(adapter.digest)
        if not self.references[adapter]:
            del self.references[adapter]
            self.recency.append(adapter)

    @rule(adapter=st.sampled_from(ADAPTERS))
    def remove(self, adapter: TinyAdapter) -> None:
        if adapter not in self.references:
            self.memory.remove(adapter.digest)
            self.known.discard(adapter)
            self.recency = [other for other in self.recency if other != adapter]
            assert not self.memory.is_resident(adapter.digest)
            assert not self.memory.knows(adapter.digest)

    @invariant()
    def references_hold(self) -> None:
        self.memory.check_invariants({adapter.digest: len(slots) for adapter, slots in self.references.items()})
        residents = {*self.references, *self.recency}
        assert set(self.memory.resident) == {adapter.digest for adapter in residents}
        assert self.memory.used_bytes == sum(adapter.size_bytes for adapter in residents)

    @invariant()
    def every_slot_handed_out_still_leads_to_its_adapter(self) -> None:
        for adapter, slots in self.references.items():
            assert len(set(slots)) == 1
            assert content(self.memory, slots[0], adapter.num_units) == [adapter.value]
            assert self.memory.table.scaling[slots[0]].tolist() == [adapter.value / 2]
        assert len({slots[0] for slots in self.references.values()}) == len(self.references)


@pytest.mark.usefixtures("paths")
class TestAdapterMemoryMachine(AdapterMemoryMachine.TestCase):
    settings = settings(derandomize=True, deadline=None, max_examples=60, stateful_step_count=30)

    @pytest.fixture(autouse=True)
    def _use_paths(self, paths: dict[str, Path]) -> None:
        AdapterMemoryMachine.paths = paths
