"""`AdapterMemory` says where in the arena the own tables of its adapters are."""

from pathlib import Path

import pytest
from torch import Tensor

from loraserve.engine.adapters.memory import AdapterMemory
from tests.support.host_accelerator import HostAccelerator
from tests.support.packed_adapters import TinyAdapter, acquire, make_adapter_memory

OWN, OTHER, PLAIN = ADAPTERS = [TinyAdapter(2, 2, has_table=True), TinyAdapter(3, 3, has_table=True), TinyAdapter(4, 2)]


@pytest.fixture(params=["cpu", "cpu_thread", "gpu"])
def memory(request: pytest.FixtureRequest, tmp_path: Path) -> AdapterMemory:
    """An arena of six units; all three adapters are known and would take seven."""
    accelerator = None if request.param.startswith("cpu") else HostAccelerator()
    background_bytes = 0 if request.param == "cpu_thread" else None
    memory = make_adapter_memory(6, accelerator=accelerator, background_bytes=background_bytes)
    for adapter in ADAPTERS:
        memory.add(adapter.digest, str(adapter.write(tmp_path)))
    return memory


def own_table(memory: AdapterMemory, slot: int) -> Tensor:
    """Once it has arrived."""
    if (arrivals := memory.arrivals([slot])) is not None:
        arrivals.before_all()
    (table,) = memory.table.own_tables[slot].values()
    return table


def test_a_table_is_a_view_of_the_arena(memory: AdapterMemory) -> None:
    slot = acquire(memory, OWN)
    assert {*memory.table.own_tables} == {slot}
    assert own_table(memory, slot).tolist() == [[2], [2]]
    assert (
        own_table(memory, slot).data_ptr() == memory.table.arena[int(memory.table.offset_a[slot, 0]) + 126 :].data_ptr()
    )


def test_a_plain_adapter_in_the_same_slot_has_no_table(memory: AdapterMemory) -> None:
    slot = acquire(memory, OWN)
    memory.release(OWN.digest)
    memory.remove(OWN.digest)
    assert acquire(memory, PLAIN) == slot
    assert memory.table.own_tables == {}


def test_tables_move_with_their_adapter(memory: AdapterMemory) -> None:
    acquire(memory, PLAIN)
    slot = acquire(memory, OWN)
    before = own_table(memory, slot).data_ptr()
    memory.release(PLAIN.digest)
    other = acquire(memory, OTHER)  # PLAIN is evicted, and OWN moves to where it was
    assert own_table(memory, slot).data_ptr() == before - PLAIN.size_bytes
    assert own_table(memory, slot).tolist() == [[2], [2]]
    assert own_table(memory, other).tolist() == [[3], [3]]
