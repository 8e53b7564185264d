import numpy as np
import pytest

from loraserve.engine.adapters import arrival as adapter_arrival
from loraserve.engine.adapters.arrival import LARGEST_PART_BYTES, Arrival, CopyParts, StepArrivals, copy_parts
from tests.support.host_accelerator import HostAccelerator

MIB = 1 << 20


def of_groups(sizes_bytes: list[int]) -> CopyParts:
    """Parts for groups of these sizes, with 2-byte elements; 0 = an absent group."""
    starts = np.cumsum([0, *sizes_bytes[:-1]]) // 2
    return copy_parts(np.where(np.array(sizes_bytes) > 0, starts, -1), sum(sizes_bytes), 2)


def test_parts_end_at_the_end_of_a_group_and_grow() -> None:
    parts = of_groups([MIB] * 12)
    assert parts.ends == (2 * MIB, 6 * MIB, 12 * MIB)
    assert parts.part_of_group == (0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2)


def test_parts_grow_up_to_a_limit() -> None:
    sizes = np.diff(of_groups([MIB] * 200).ends)
    assert sizes[-2] == sizes.max() == LARGEST_PART_BYTES


def test_a_group_is_never_split() -> None:
    assert of_groups([3 * MIB, 100 * MIB, 2]).ends == (3 * MIB, 103 * MIB, 103 * MIB + 2)


def test_an_absent_group_is_in_the_part_of_the_groups_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_arrival, "FIRST_PART_BYTES", 1)
    parts = of_groups([0, 256, 0, 512, 0])
    assert parts.ends == (256, 768)
    assert parts.part_of_group == (-1, 0, 0, 1, 1)


def make_arrival(accelerator: HostAccelerator) -> Arrival:
    """Five groups in three parts; the first group is absent."""
    return Arrival(accelerator, CopyParts((1, 2, 3), (-1, 0, 0, 1, 2)), [accelerator.record() for _ in range(3)])


def test_each_group_waits_for_its_part_once() -> None:
    accelerator = HostAccelerator()
    arrival = make_arrival(accelerator)
    first, _, last = accelerator.events
    arrival.before_group(0)
    assert accelerator.waited_for == []
    arrival.before_group(1)
    arrival.before_group(2)
    assert accelerator.waited_for == [first]
    assert not arrival.is_waited
    arrival.before_group(4)
    arrival.before_group(3)
    arrival.before_all()
    assert accelerator.waited_for == [first, last], "what is before the last part is there with it"
    assert arrival.is_waited


def test_a_step_waits_for_all_of_its_adapters() -> None:
    accelerator = HostAccelerator()
    arrivals = [make_arrival(accelerator), make_arrival(accelerator)]
    step = StepArrivals(arrivals)
    step.before_group(1)
    assert accelerator.waited_for == [accelerator.events[0], accelerator.events[3]]
    step.before_all()
    assert all(arrival.is_waited for arrival in arrivals)
