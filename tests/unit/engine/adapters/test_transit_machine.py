"""Adapters that arrive on a device, with everything that can happen to them, in any order."""

import os
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.host_accelerator import HostAccelerator
from tests.support.manual_threads import use_manual_threads
from tests.support.packed_adapters import TinyAdapter, acquire, content, make_adapter_memory

ADAPTERS = [TinyAdapter(1, 1), TinyAdapter(2, 2), TinyAdapter(3, 3)]
NUM_UNITS = 6


class TransitMachine(RuleBasedStateMachine):
    """Adapters of 1, 2 and 3 units, in an arena of six with two slots and a tier of four."""

    paths: dict[TinyAdapter, Path]
    host_tier_units = 4
    background_bytes: int | None = None
    """Set for a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = make_adapter_memory(
            NUM_UNITS,
            max_resident=2,
            accelerator=HostAccelerator() if self.background_bytes is None else None,
            host_tier_units=self.host_tier_units,
            background_bytes=self.background_bytes,
        )
        self.memory.table.arena.zero_()
        self.uploader = self.memory._transit._uploader
        self.references: dict[TinyAdapter, list[int]] = {}
        self.known: set[TinyAdapter] = set()
        self.num_writes = 0

    @rule(adapter=st.sampled_from(ADAPTERS), is_new_file=st.booleans())
    def add(self, adapter: TinyAdapter, is_new_file: bool) -> None:
        if is_new_file:
            self.num_writes += 1
            os.utime(self.paths[adapter], ns=(0, self.num_writes))
        self.memory.add(adapter.digest, str(self.paths[adapter]))
        self.known.add(adapter)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), is_patient=st.booleans(), max_arriving_bytes=st.sampled_from([None, 0, 2 * 256]))
    def acquire(self, data: st.DataObject, is_patient: bool, max_arriving_bytes: int | None) -> None:
        adapter = data.draw(st.sampled_from(sorted(self.known, key=lambda a: a.value)))
        others = [other for other in self.references if other != adapter]
        has_room = sum(other.num_units for other in others) + adapter.num_units <= NUM_UNITS and len(others) < 2
        if is_patient and has_room:
            adapter_slot: int | None = acquire(self.memory, adapter)
        else:
            self.memory.settle_uploads()
            adapter_slot = self.memory.try_acquire(adapter.digest, max_arriving_bytes)
            assert adapter_slot is None or has_room
        if adapter_slot is not None:
            assert self.memory.is_resident(adapter.digest)
            self.references.setdefault(adapter, []).append(adapter_slot)

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        adapter = data.draw(st.sampled_from(sorted(self.references, key=lambda a: a.value)))
        self.references[adapter].pop()
        self.memory.release(adapter.digest)
        if not self.references[adapter]:
            del self.references[adapter]

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def prefetch(self, data: st.DataObject) -> None:
        self.memory.prefetch(data.draw(st.sampled_from(sorted(self.known, key=lambda a: a.value))).digest)

    @rule(adapter=st.sampled_from(ADAPTERS))
    def remove(self, adapter: TinyAdapter) -> None:
        if adapter not in self.references:
            self.memory.remove(adapter.digest)
            self.known.discard(adapter)

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """A step with some of the acquired adapters."""
        adapters = data.draw(st.sets(st.sampled_from(sorted(self.references, key=lambda a: a.value))))
        arrivals = self.memory.arrivals(self.references[adapter][0] for adapter in adapters)
        if arrivals is not None:
            arrivals.before_group(0)
        for adapter in adapters:
            assert content(self.memory, self.references[adapter][0], adapter.num_units) == [adapter.value]
            assert self.memory.table.scaling[self.references[adapter][0]].tolist() == [adapter.value / 2]

    @rule(is_filler=st.booleans())
    def let_a_thread_run(self, is_filler: bool) -> None:
        thread = self.uploader._filler if is_filler else self.uploader._thread
        thread.run_next()  # type: ignore[attr-defined]

    @rule()
    def wait(self) -> None:
        self.memory.wait_for_upload()

    @invariant()
    def nothing_is_lost(self) -> None:
        self.memory.check_invariants({adapter.digest: len(slots) for adapter, slots in self.references.items()})
        assert all(len(set(slots)) == 1 for slots in self.references.values())
        assert len({slots[0] for slots in self.references.values()}) == len(self.references)

    def teardown(self) -> None:
        for adapter in ADAPTERS:
            for _ in self.references.pop(adapter, []):
                self.memory.release(adapter.digest)
            self.memory.remove(adapter.digest)
        assert self.memory.used_bytes == 0
        self.memory.check_invariants({})


class TierlessMachine(TransitMachine):
    host_tier_units = 0


class CpuMachine(TransitMachine):
    """The smallest adapter is loaded at once."""

    host_tier_units = 0
    background_bytes = ADAPTERS[1].size_bytes


@pytest.fixture(autouse=True)
def _surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_manual_threads(monkeypatch)
    paths = {adapter: adapter.write(tmp_path) for adapter in ADAPTERS}
    monkeypatch.setattr(TransitMachine, "paths", paths, raising=False)


class TestTransitMachine(TransitMachine.TestCase):
    settings = settings(derandomize=True, deadline=None, max_examples=60, stateful_step_count=30)


class TestCpuMachine(CpuMachine.TestCase):
    settings = settings(derandomize=True, deadline=None, max_examples=60, stateful_step_count=30)


class TestTierlessMachine(TierlessMachine.TestCase):
    settings = settings(derandomize=True, deadline=None, max_examples=30, stateful_step_count=30)
