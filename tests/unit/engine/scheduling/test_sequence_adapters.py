from pathlib import Path

import pytest

from loraserve.engine.adapters.memory import AdapterMemory
from loraserve.engine.request import EngineRequest, SamplingParams
from loraserve.engine.scheduling.sequence import RequestState, Sequence
from loraserve.engine.scheduling.sequence_adapters import SequenceAdapters
from tests.support.packed_adapters import TinyAdapter, make_adapter_memory

SMALL, OTHER_SMALL, LARGE = TinyAdapter(1, 1), TinyAdapter(2, 1), TinyAdapter(3, 4)


@pytest.fixture
def memory(tmp_path: Path) -> AdapterMemory:
    """Room for the two small adapters, or for the large one alone."""
    memory = make_adapter_memory(4)
    for adapter in (SMALL, OTHER_SMALL, LARGE):
        memory.add(adapter.digest, str(adapter.write(tmp_path)))
    return memory


def sequence(adapter: TinyAdapter | None) -> Sequence:
    digest = None if adapter is None else adapter.digest
    request = EngineRequest("r", [1, 2], SamplingParams(max_tokens=9), adapter_digest=digest)
    return Sequence(RequestState(request, 0.0, b""), 0, [1, 2], 2)


@pytest.mark.parametrize("with_memory", [False, True])
def test_the_base_model_is_always_available_and_holds_no_reference(memory: AdapterMemory, with_memory: bool) -> None:
    adapters = SequenceAdapters(memory if with_memory else None, max_loras=1)
    base = sequence(None)
    assert adapters.can_acquire(base)
    assert not adapters.is_cold(base)
    assert adapters.try_acquire(base, 0)
    assert base.adapter_slot == -1
    adapters.check_invariants([base])
    adapters.release(base)


def test_references_are_counted_for_a_parent_and_its_fork(memory: AdapterMemory) -> None:
    adapters = SequenceAdapters(memory, max_loras=None)
    parent, child = sequence(SMALL), sequence(SMALL)
    assert adapters.is_cold(parent)
    assert adapters.try_acquire(parent, None)
    assert not adapters.is_cold(child)
    adapters.share(parent, child)
    assert child.adapter_slot == parent.adapter_slot >= 0
    adapters.check_invariants([parent, child])
    adapters.release(parent)
    assert parent.adapter_slot == -1
    adapters.check_invariants([child])
    assert memory.is_in_use(SMALL.digest)
    adapters.release(child)
    adapters.check_invariants([])
    assert not memory.is_in_use(SMALL.digest)


def test_a_lost_reference_is_reported(memory: AdapterMemory) -> None:
    adapters = SequenceAdapters(memory, max_loras=None)
    running = sequence(SMALL)
    assert adapters.try_acquire(running, None)
    with pytest.raises(AssertionError, match="adapter references"):
        adapters.check_invariants([])


def test_an_adapter_that_does_not_fit_beside_those_in_use_is_not_acquired(memory: AdapterMemory) -> None:
    adapters = SequenceAdapters(memory, max_loras=None)
    assert adapters.try_acquire(sequence(SMALL), None)
    waiting = sequence(LARGE)
    assert not adapters.can_acquire(waiting)
    assert not adapters.try_acquire(waiting, None)
    assert waiting.adapter_slot == -1


def test_max_loras_bounds_the_adapters_in_use_not_their_sequences(memory: AdapterMemory) -> None:
    adapters = SequenceAdapters(memory, max_loras=1)
    running = sequence(SMALL)
    assert adapters.try_acquire(running, None)
    assert adapters.can_acquire(sequence(SMALL))
    assert not adapters.can_acquire(sequence(OTHER_SMALL))
    adapters.release(running)
    assert adapters.can_acquire(sequence(OTHER_SMALL))
