"""`AdapterMemory` has a DoRA adapter's factors computed once per load: after all of it has arrived, before it is used.

Likewise the differences of trained token rows from the base model's.
"""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from loraserve_adapters.packed import PackedTable, PackedTokens
from torch import Tensor

from loraserve.engine.adapters.memory import AdapterMemory
from tests.support.host_accelerator import HostAccelerator
from tests.support.packed_adapters import UNIT, TinyAdapter, acquire, make_adapter_memory

DORA, OTHER, PLAIN = ADAPTERS = [TinyAdapter(2, 2, is_dora=True), TinyAdapter(3, 3, is_dora=True), TinyAdapter(4, 2)]
FACTOR = 100


@dataclass(slots=True)
class Finisher:
    """Multiplies a magnitude, so that a second call shows, and so does a call before the adapter has arrived."""

    values: list[float] = field(default_factory=list)
    """The magnitudes, in the order of the calls."""

    tokens: list[tuple[PackedTokens, ...]] = field(default_factory=list)
    """The adapters' trained tokens, in the same order."""

    def __call__(self, table: PackedTable, values: Tensor) -> None:
        offset = int(table.offset_magnitude[0])
        self.values.append(float(values[offset]))
        values[offset] *= FACTOR
        self.tokens.append(table.trained_tokens)


@pytest.fixture
def finisher() -> Finisher:
    return Finisher()


@pytest.fixture(params=["cpu", "cpu_thread", "file", "host_tier"])
def memory(request: pytest.FixtureRequest, finisher: Finisher, tmp_path: Path) -> AdapterMemory:
    """An arena of six units; all three adapters are known and would take seven."""
    accelerator = None if request.param.startswith("cpu") else HostAccelerator()
    host_tier_units = 10 if request.param == "host_tier" else 0
    background_bytes = 0 if request.param == "cpu_thread" else None
    memory = make_adapter_memory(
        6,
        accelerator=accelerator,
        host_tier_units=host_tier_units,
        finish=finisher,
        background_bytes=background_bytes,
    )
    for adapter in ADAPTERS:
        memory.add(adapter.digest, str(adapter.write(tmp_path)))
    return memory


def factor_in_arena(memory: AdapterMemory, adapter_slot: int) -> float:
    """As the kernels read it."""
    return float(memory.table.arena[int(memory.table.offset_magnitude[adapter_slot, 0])])


def use(memory: AdapterMemory, adapter: TinyAdapter) -> float:
    adapter_slot = acquire(memory, adapter)
    found = factor_in_arena(memory, adapter_slot)
    memory.release(adapter.digest)
    return found


def test_factors_are_computed_once_per_load(memory: AdapterMemory, finisher: Finisher) -> None:
    assert [use(memory, DORA) for _ in range(3)] == [200] * 3
    assert finisher.values == [2]
    assert use(memory, OTHER) == 300
    acquire(memory, PLAIN)  # evicts DORA
    assert not memory.is_resident(DORA.digest)
    memory.release(PLAIN.digest)
    assert use(memory, DORA) == 200
    assert finisher.values == [2, 3, 2]


def test_a_plain_adapter_in_the_same_slot_has_no_factors(memory: AdapterMemory, finisher: Finisher) -> None:
    slot = acquire(memory, DORA)
    memory.release(DORA.digest)
    memory.remove(DORA.digest)
    assert acquire(memory, PLAIN) == slot
    assert int(memory.table.offset_magnitude[slot, 0]) == -1
    assert finisher.values == [2]


def test_factors_move_with_their_adapter(memory: AdapterMemory, finisher: Finisher) -> None:
    acquire(memory, PLAIN)
    slot = acquire(memory, DORA)
    memory.release(PLAIN.digest)
    start = int(memory.table.offset_a[slot, 0])
    assert use(memory, OTHER) == 300
    assert int(memory.table.offset_a[slot, 0]) == start - 2 * UNIT
    assert factor_in_arena(memory, slot) == 200
    assert finisher.values == [2, 3]


def test_factors_of_an_adapter_removed_before_its_first_use_are_not_computed(
    memory: AdapterMemory, finisher: Finisher, tmp_path: Path
) -> None:
    memory.prefetch(DORA.digest)
    memory.remove(DORA.digest)
    memory.add(DORA.digest, str(DORA.write(tmp_path)))
    assert finisher.values == []
    assert use(memory, DORA) == 200


def test_a_dora_adapter_is_not_acquired_while_it_is_being_copied(finisher: Finisher, tmp_path: Path) -> None:
    memory = make_adapter_memory(8, accelerator=HostAccelerator(), host_tier_units=8, finish=finisher)
    for adapter in (DORA, PLAIN):
        memory.add(adapter.digest, str(adapter.write(tmp_path)))
        load_into_tier(memory, adapter)
    assert memory.try_acquire(PLAIN.digest) is not None
    assert memory.try_acquire(DORA.digest) is None
    assert finisher.values == []
    memory.settle_uploads()
    acquire(memory, DORA)
    assert finisher.values == [2]


def test_an_adapter_with_trained_token_rows_is_finished_too(
    memory: AdapterMemory, finisher: Finisher, tmp_path: Path
) -> None:
    tokens = TinyAdapter(5, 1, has_tokens=True)
    memory.add(tokens.digest, str(tokens.write(tmp_path)))
    for _ in range(2):
        acquire(memory, tokens)
        memory.release(tokens.digest)
    assert len(finisher.values) == 1
    assert finisher.tokens == [(PackedTokens(0, (1,)),)]


def load_into_tier(memory: AdapterMemory, adapter: TinyAdapter) -> None:
    assert memory._transit._tier is not None
    filling = memory._transit._tier._staged[adapter.digest].filling
    assert filling is not None
    filling.result()
