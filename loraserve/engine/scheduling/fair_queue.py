"""Waiting requests: a queue for each tenant, ordered by priority and arrival; between tenants by service received.

Virtual token counters (Sheng et al., OSDI 2024, "Fairness in Serving Large Language Models"): each tenant's counter
grows by the tokens computed for it; the tenant with the smallest counter goes first. A tenant with nothing waiting
lacks nothing, so it earns no credit while others are served: when it waits again, its counter starts no lower than the
smallest counter among waiting tenants or, if none waits, the largest among tenants with live sequences. Nor does it
start lower than where it stopped, so finishing its work clears no debt: tenants that come and go cannot starve one that
waits.
"""

from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace
from itertools import chain
from math import inf

from loraserve.engine.request import EngineRequest
from loraserve.engine.scheduling.sequence import Sequence


class _TenantQueue:
    """First in, first out among sequences of one priority; lower ones go first."""

    def __init__(self) -> None:
        self._by_priority: dict[int, deque[Sequence]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_priority)

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(self._by_priority[priority] for priority in sorted(self._by_priority))

    @property
    def first(self) -> Sequence:
        return self._by_priority[min(self._by_priority)][0]

    def append(self, sequence: Sequence) -> None:
        self._by_priority.setdefault(sequence.request.priority, deque()).append(sequence)

    def put_back(self, sequence: Sequence) -> None:
        self._by_priority.setdefault(sequence.request.priority, deque()).appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        priority = sequence.request.priority
        self._by_priority[priority].remove(sequence)
        if not self._by_priority[priority]:
            del self._by_priority[priority]


class FairQueue:
    def __init__(self) -> None:
        self._waiting: dict[str, _TenantQueue] = {}
        self._served: dict[str, float] = {}
        self._num_live: dict[str, int] = {}
        """Waiting and running sequences of each tenant; a tenant with none is idle."""
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        """In the order to try them: always the least-served tenant's next; among equals, the longest-waiting tenant's.

        Charges made between two items count, and yielded sequences may be removed.
        """
        order = [(self._served[tenant], place, tenant) for place, tenant in enumerate(self._waiting)]
        heapify(order)
        begun: dict[str, Iterator[Sequence]] = {}
        while order:
            served, place, tenant = order[0]
            if served < self._served.get(tenant, served):
                heapreplace(order, (self._served[tenant], place, tenant))
                continue
            if tenant not in begun:
                begun[tenant] = iter([*self._waiting[tenant]])
            sequence = next(begun[tenant], None)
            if sequence is None:
                heappop(order)
            else:
                yield sequence

    def in_any_order(self) -> Iterator[Sequence]:
        """All waiting sequences, without the cost of ordering them."""
        return chain.from_iterable(self._waiting.values())

    def arrive(self, tenant: str) -> None:
        """A sequence of the tenant becomes live."""
        self._served.setdefault(tenant, 0.0)
        self._num_live[tenant] = self._num_live.get(tenant, 0) + 1

    def leave(self, tenant: str) -> None:
        """A live sequence of the tenant finished."""
        self._num_live[tenant] -= 1
        if self._num_live[tenant] == 0:
            del self._num_live[tenant]
            self._forget_idle()

    def charge(self, tenant: str, num_tokens: float) -> None:
        """num_tokens: already divided by the tenant's weight."""
        self._served[tenant] += num_tokens

    def served(self, tenant: str) -> float:
        return self._served[tenant]

    def first_of(self, tenant: str) -> Sequence | None:
        """None if none of the tenant waits."""
        own = self._waiting.get(tenant)
        return None if own is None else own.first

    def of(self, tenant: str) -> list[Sequence]:
        """Those of the tenant, in order."""
        return [*self._waiting.get(tenant, ())]

    def has_waiting_before(self, request: EngineRequest) -> bool:
        """Whether another tenant is waiting that was not served more, or the same one with a more urgent request."""
        tenant, served = request.tenant, self._served[request.tenant]
        own = self._waiting.get(tenant)
        if own is not None and own.first.request.priority < request.priority:
            return True
        return any(name != tenant and self._served[name] <= served for name in self._waiting)

    def append(self, sequence: Sequence) -> None:
        """Last in its tenant's queue among those of its priority."""
        tenant = sequence.request.tenant
        if tenant not in self._waiting:
            self._served[tenant] = max(self._served[tenant], self._least_of_new())
            self._waiting[tenant] = _TenantQueue()
        self._waiting[tenant].append(sequence)
        self._num_waiting += 1

    def put_back(self, sequence: Sequence) -> None:
        """First in its tenant's queue among those of its priority, for a preempted sequence."""
        self._waiting.setdefault(sequence.request.tenant, _TenantQueue()).put_back(sequence)
        self._num_waiting += 1

    def remove(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        self._waiting[tenant].remove(sequence)
        self._num_waiting -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]

    def _least_of_new(self) -> float:
        """Lower bound for the counter of a tenant that had nothing waiting."""
        if self._waiting:
            return min(self._served[name] for name in self._waiting)
        return max((self._served[name] for name in self._num_live), default=0.0)

    def _forget_idle(self) -> None:
        """Drop the counters of idle tenants that would start no lower without them."""
        smallest = min((self._served[name] for name in self._num_live), default=inf)
        self._served = {
            name: served for name, served in self._served.items() if name in self._num_live or served > smallest
        }
