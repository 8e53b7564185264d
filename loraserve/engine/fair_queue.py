"""Waiting requests, one first-in-first-out queue for each tenant, ordered between tenants by service received.

Virtual token counters (Sheng et al., OSDI 2024, "Fairness in Serving Large Language Models"): each tenant's counter
grows by the tokens computed for it; the tenant with the smallest counter goes first. A tenant with nothing waiting has
all it asked for, so what others get meanwhile earns it no credit: when it waits again it starts no lower than the
smallest counter of those that wait, or, if none does, than the largest of all. And no lower than where it left, so that
finishing its work pays no debt: tenants that come and go cannot starve one that waits.
"""

from collections import deque
from collections.abc import Iterator
from math import inf

from loraserve.engine.sequence import Sequence


class FairQueue:
    def __init__(self) -> None:
        self._waiting: dict[str, deque[Sequence]] = {}
        self._served: dict[str, float] = {}
        self._num_live: dict[str, int] = {}
        """Waiting and running sequences of each tenant; a tenant with none is idle."""

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._waiting.values())

    def __iter__(self) -> Iterator[Sequence]:
        """In the order to be tried: each time the least-served tenant's next, of equals the one that waits longest.

        Charges between two items count.
        """
        remaining = {tenant: deque(queue) for tenant, queue in self._waiting.items()}
        while remaining:
            tenant = min(remaining, key=self._served.__getitem__)
            yield remaining[tenant].popleft()
            if not remaining[tenant]:
                del remaining[tenant]

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
        """num_tokens: divided by the tenant's weight."""
        self._served[tenant] += num_tokens

    def served(self, tenant: str) -> float:
        return self._served[tenant]

    def has_waiting_before(self, tenant: str) -> bool:
        """Whether another tenant waits that was not served more."""
        return any(name != tenant and self._served[name] <= self._served[tenant] for name in self._waiting)

    def append(self, sequence: Sequence) -> None:
        """Last in its tenant's queue."""
        tenant = sequence.request.tenant
        if tenant not in self._waiting:
            self._served[tenant] = max(self._served[tenant], self._least_of_new())
            self._waiting[tenant] = deque()
        self._waiting[tenant].append(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """First in its tenant's queue, for a preempted sequence."""
        self._waiting.setdefault(sequence.request.tenant, deque()).appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        self._waiting[tenant].remove(sequence)
        if not self._waiting[tenant]:
            del self._waiting[tenant]

    def _least_of_new(self) -> float:
        """Where a tenant starts that had nothing waiting."""
        if self._waiting:
            return min(self._served[name] for name in self._waiting)
        return max((self._served[name] for name in self._num_live), default=0.0)

    def _forget_idle(self) -> None:
        """Drop the counters of idle tenants that would start no lower without them."""
        smallest = min((self._served[name] for name in self._num_live), default=inf)
        self._served = {
            name: served for name, served in self._served.items() if name in self._num_live or served > smallest
        }
