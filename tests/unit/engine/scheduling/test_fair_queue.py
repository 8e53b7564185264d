from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loraserve.engine.request import EngineRequest, SamplingParams
from loraserve.engine.scheduling.fair_queue import FairQueue
from loraserve.engine.scheduling.sequence import RequestState, Sequence

TENANTS = ["a", "b", "c"]


def make_sequence(tenant: str, name: str = "r", priority: int = 0) -> Sequence:
    request = EngineRequest(name, [1], SamplingParams(max_tokens=1), tenant=tenant, priority=priority)
    return Sequence(RequestState(request, arrival_s=0.0, root_hash=b""), 0, [1], 1)


def push(queue: FairQueue, tenant: str, name: str = "r", priority: int = 0) -> Sequence:
    sequence = make_sequence(tenant, name, priority)
    queue.arrive(tenant)
    queue.append(sequence)
    return sequence


def admit(queue: FairQueue, num_tokens: int) -> Sequence:
    """Remove the first sequence in order and charge its tenant."""
    sequence = next(iter(queue))
    queue.remove(sequence)
    queue.charge(sequence.request.tenant, num_tokens)
    return sequence


def names(queue: FairQueue) -> list[str]:
    return [sequence.request.request_id for sequence in queue]


def test_requests_of_one_tenant_are_served_first_in_first_out() -> None:
    queue = FairQueue()
    for name in ("1", "2", "3"):
        push(queue, "a", name)
    assert names(queue) == ["1", "2", "3"]


def test_requests_of_one_tenant_are_served_by_priority_first_and_those_put_back_before_their_equals() -> None:
    queue = FairQueue()
    assert queue.first_of("a") is None
    for name, priority in (("c1", 5), ("b1", 0), ("c2", 5), ("a1", -1), ("b2", 0)):
        push(queue, "a", name, priority)
    assert names(queue) == ["a1", "b1", "b2", "c1", "c2"]
    queue.put_back(make_sequence("a", "c0", 5))
    assert names(queue) == ["a1", "b1", "b2", "c0", "c1", "c2"]
    first = queue.first_of("a")
    assert first is not None
    assert queue.first_of("b") is None
    queue.remove(first)
    assert names(queue) == ["b1", "b2", "c0", "c1", "c2"]
    assert sorted(each.request.request_id for each in queue.in_any_order()) == ["b1", "b2", "c0", "c1", "c2"]


def test_priority_does_not_order_tenants() -> None:
    queue = FairQueue()
    push(queue, "a", "later", 9)
    push(queue, "b", "urgent", -9)
    assert names(queue) == ["later", "urgent"]


def test_the_least_served_tenant_goes_first() -> None:
    queue = FairQueue()
    push(queue, "a", "a")
    push(queue, "b", "b")
    queue.charge("a", 10)
    assert names(queue) == ["b", "a"]


def test_charges_between_two_items_change_the_order() -> None:
    queue = FairQueue()
    for name in ("a1", "a2", "b1", "b2"):
        push(queue, name[0], name)
    order = []
    for sequence in queue:
        order.append(sequence.request.request_id)
        queue.charge(sequence.request.tenant, 5)
    assert order == ["a1", "b1", "a2", "b2"]


class CountingReads(dict[str, float]):
    def __init__(self, values: dict[str, float]) -> None:
        super().__init__(values)
        self.num_reads = 0

    def __getitem__(self, tenant: str) -> float:
        self.num_reads += 1
        return super().__getitem__(tenant)

    def get(self, tenant: str, default: float = 0.0) -> float:
        self.num_reads += 1
        return super().get(tenant, default)


def test_iterating_over_many_tenants_reads_each_counter_only_a_few_times() -> None:
    queue = FairQueue()
    for i in range(1000):
        push(queue, f"tenant {i}", str(i))
        queue.charge(f"tenant {i}", -i % 7)
    queue._served = served = CountingReads(queue._served)
    order = [sequence.request.tenant for sequence in queue]
    assert served.num_reads <= 5 * len(order)
    assert order == sorted(order, key=served.__getitem__)


def test_in_any_order_yields_all_waiting_sequences_without_reading_the_counters() -> None:
    queue = FairQueue()
    for name in ("a1", "a2", "b1"):
        push(queue, name[0], name)
    queue._served = served = CountingReads(queue._served)
    assert {sequence.request.request_id for sequence in queue.in_any_order()} == {"a1", "a2", "b1"}
    assert served.num_reads == 0


def test_a_preempted_sequence_returns_to_the_head_of_its_tenants_queue() -> None:
    queue = FairQueue()
    first, second = push(queue, "a", "1"), push(queue, "a", "2")
    push(queue, "a", "3")
    queue.remove(first)
    queue.remove(second)
    queue.put_back(second)
    queue.put_back(first)
    assert names(queue) == ["1", "2", "3"]


def test_a_tenant_that_begins_to_wait_starts_at_the_smallest_counter_of_waiting_tenants() -> None:
    queue = FairQueue()
    push(queue, "a")
    push(queue, "b")
    queue.charge("a", 100)
    queue.charge("b", 70)
    queue.arrive("slow")  # runs, but has nothing waiting
    queue.charge("slow", 1)
    push(queue, "c")
    assert queue.served("c") == 70


def test_a_tenant_with_nothing_waiting_earns_no_credit_while_others_are_served() -> None:
    queue = FairQueue()
    for tenant, num_tokens in (("slow", 4_000), ("fast", 400_000)):
        push(queue, tenant)
        admit(queue, num_tokens)
    push(queue, "slow")
    assert queue.served("slow") == queue.served("fast")
    queue.charge("fast", 10)
    push(queue, "fast")
    assert [sequence.request.tenant for sequence in queue] == ["slow", "fast"]


def test_a_tenant_keeps_its_counter_while_it_has_live_sequences() -> None:
    queue = FairQueue()
    queue.arrive("a")
    queue.arrive("b")
    queue.charge("a", 100)
    queue.arrive("a")
    queue.leave("a")
    assert queue.served("a") == 100


def test_finishing_all_its_work_does_not_clear_a_tenants_debt() -> None:
    queue = FairQueue()
    queue.arrive("waits")
    queue.arrive("greedy")
    queue.charge("greedy", 50)
    queue.leave("greedy")
    push(queue, "greedy")
    assert queue.served("greedy") == 50


def test_short_lived_tenants_do_not_starve_one_that_was_served_more() -> None:
    queue = FairQueue()
    push(queue, "waits", "first")
    push(queue, "b")
    queue.charge("waits", 100)
    for _ in range(50):
        waiting = {sequence.request.tenant for sequence in queue}
        push(queue, "c" if "b" in waiting else "b")
        sequence = admit(queue, num_tokens=10)
        if sequence.request.tenant == "waits":
            return
        queue.leave(sequence.request.tenant)
    pytest.fail("never served, though each of the others was given five times as much")


def test_among_equally_served_tenants_the_longest_waiting_goes_first() -> None:
    queue = FairQueue()
    push(queue, "z", "z")
    for _ in range(5):
        push(queue, "a", "a")
        queue.arrive("a")
        assert names(queue)[0] == "z"
        queue.remove(list(queue)[-1])


def test_no_tenant_state_is_kept_once_all_tenants_are_idle() -> None:
    queue = FairQueue()
    for i in range(100):
        sequence = push(queue, f"tenant {i}")
        queue.charge(f"tenant {i}", i)
        queue.remove(sequence)
    for i in range(100):
        queue.leave(f"tenant {i}")
    assert (queue._served, queue._num_live, queue._waiting) == ({}, {}, {})


def test_idle_tenants_are_forgotten_once_active_tenants_overtake_them() -> None:
    queue = FairQueue()
    queue.arrive("stays")
    for i in range(100):
        queue.arrive(f"tenant {i}")
        queue.charge(f"tenant {i}", 5)
        queue.charge("stays", 5)
        queue.leave(f"tenant {i}")
    assert len(queue._served) <= 2


@dataclass
class Tenant:
    served: float = 0.0
    waiting: list[Sequence] = field(default_factory=list)
    num_running: int = 0

    @property
    def is_live(self) -> bool:
        return bool(self.waiting) or self.num_running > 0


class FairQueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue()
        self.tenants = {name: Tenant() for name in TENANTS}
        self.running: list[Sequence] = []

    @rule(name=st.sampled_from(TENANTS))
    def arrive(self, name: str) -> None:
        tenant = self.tenants[name]
        if not tenant.waiting:
            waiting = [other.served for other in self.tenants.values() if other.waiting]
            live = [other.served for other in self.tenants.values() if other.is_live]
            tenant.served = max(tenant.served, min(waiting) if waiting else max(live, default=0.0))
        tenant.waiting.append(push(self.queue, name))

    @precondition(lambda self: len(self.queue))
    @rule(num_tokens=st.integers(0, 20))
    def admit_first(self, num_tokens: int) -> None:
        sequence = admit(self.queue, num_tokens)
        tenant = self.tenants[sequence.request.tenant]
        least = min(other.served for other in self.tenants.values() if other.waiting)
        assert tenant.served == least, "another tenant was served less"
        assert tenant.waiting.pop(0) is sequence
        tenant.num_running += 1
        tenant.served += num_tokens
        self.running.append(sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(0, 20))
    def charge(self, data: st.DataObject, num_tokens: int) -> None:
        name = data.draw(st.sampled_from(self.running)).request.tenant
        self.queue.charge(name, num_tokens)
        self.tenants[name].served += num_tokens

    @precondition(lambda self: self.running)
    @rule()
    def preempt_newest(self) -> None:
        sequence = self.running.pop()
        self.queue.put_back(sequence)
        tenant = self.tenants[sequence.request.tenant]
        tenant.num_running -= 1
        tenant.waiting.insert(0, sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        sequence = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self._left(self.tenants[sequence.request.tenant], sequence.request.tenant, was_running=True)

    @precondition(lambda self: len(self.queue))
    @rule(data=st.data())
    def abort_waiting(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(list(self.queue)))
        self.queue.remove(sequence)
        name = sequence.request.tenant
        self.tenants[name].waiting.remove(sequence)
        self._left(self.tenants[name], name, was_running=False)

    def _left(self, tenant: Tenant, name: str, *, was_running: bool) -> None:
        tenant.num_running -= was_running
        self.queue.leave(name)
        if not any(other.is_live for other in self.tenants.values()):
            for other in self.tenants.values():
                other.served = 0.0

    @invariant()
    def every_waiting_sequence_is_tried_once_in_its_tenants_order(self) -> None:
        order = list(self.queue)
        assert len(order) == len(self.queue) == sum(len(tenant.waiting) for tenant in self.tenants.values())
        for name, tenant in self.tenants.items():
            assert [s for s in order if s.request.tenant == name] == tenant.waiting

    @invariant()
    def counters_agree_and_idle_tenants_that_owe_nothing_are_forgotten(self) -> None:
        live = {name for name, tenant in self.tenants.items() if tenant.is_live}
        for name in live:
            assert self.queue.served(name) == self.tenants[name].served
        assert set(self.queue._num_live) == live
        assert live or not self.queue._served


TestFairQueueMachine = FairQueueMachine.TestCase
TestFairQueueMachine.settings = settings(derandomize=True, deadline=None, max_examples=80, stateful_step_count=40)
