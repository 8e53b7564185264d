"""Which running sequences give way to a more urgent one of their tenant."""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from loraserve_adapters.errors import AdapterError

from loraserve.engine.kv.blocks import BlockPool
from loraserve.engine.scheduling.fair_queue import FairQueue
from loraserve.engine.scheduling.sequence import Sequence
from loraserve.engine.scheduling.sequence_adapters import SequenceAdapters
from loraserve.engine.scheduling.sequence_blocks import SequenceBlocks


@dataclass(frozen=True, slots=True)
class Way:
    urgent: Sequence
    """Waiting."""
    victims: list[Sequence]
    """Running. Once they are preempted, the urgent one has a seat and blocks."""
    overtaken: list[Sequence]
    """Before it in its tenant's queue, but their adapters do not fit or are not there yet."""
    is_first_use: bool = False
    """Of its adapter, since that was loaded."""
    error: str | None = None
    """Why the adapter cannot be loaded; then there are no victims."""


@dataclass(slots=True)
class _Freed:
    """What the preemption of some sequences frees."""

    pool: BlockPool
    kept: frozenset[int]
    """Blocks that are needed again at once."""
    num_seats: int = 0
    num_blocks: int = 0
    _held: Counter[int] = field(default_factory=Counter[int])

    def add(self, victim: Sequence) -> None:
        self.num_seats += victim.num_seats
        for block in victim.blocks:
            self._held[block] += 1
            if block not in self.kept and self._held[block] == self.pool.num_references(block):
                self.num_blocks += 1


class WayFinder:
    def __init__(
        self,
        waiting: FairQueue,
        blocks: SequenceBlocks,
        pool: BlockPool,
        adapters: SequenceAdapters,
        *,
        max_num_seqs: int,
        max_bypassed: int,
    ) -> None:
        """max_bypassed: nothing overtakes a sequence that was bypassed as often."""
        self._waiting = waiting
        self._blocks = blocks
        self._pool = pool
        self._adapters = adapters
        self._max_num_seqs = max_num_seqs
        self._max_bypassed = max_bypassed
        self.may_open = False
        """Whether less urgent sequences that `find` left alone can give way once they have a token."""

    def find(self, running: Seq[Sequence]) -> Way | None:
        """Only sequences that got a token since their admission give way: so each time they get at least one, and most
        of what they lose is found in the prefix cache."""
        self.may_open = False
        of_tenants: dict[str, list[Sequence]] = {}
        for each in running:
            of_tenants.setdefault(each.request.tenant, []).append(each)
        for tenant, own in of_tenants.items():
            first = self._waiting.first_of(tenant)
            if first is None or all(each.request.priority <= first.request.priority for each in own):
                continue
            way = self._find(self._waiting.of(tenant), own, running)
            if way is not None:
                return way
        return None

    def _find(self, waiting: Iterable[Sequence], own: list[Sequence], running: Seq[Sequence]) -> Way | None:
        overtaken: list[Sequence] = []
        for urgent in waiting:
            less_urgent = [each for each in own if each.request.priority > urgent.request.priority]
            if not less_urgent:
                return None
            if self._adapters.can_acquire(urgent):
                ripe = [each for each in less_urgent if each.num_computed_tokens >= each.num_admitted_tokens]
                self.may_open = self.may_open or len(ripe) < len(less_urgent)
                victims = self._choose_victims(urgent, ripe, running)
                if not victims:
                    return None
                way = self._ready(urgent, victims, overtaken)
                if way is not None:
                    return way
                if self._adapters.is_arriving(urgent):
                    continue
            if urgent.state.num_bypassed >= self._max_bypassed:
                return None
            overtaken.append(urgent)
        return None

    def _choose_victims(self, urgent: Sequence, ripe: list[Sequence], running: Seq[Sequence]) -> list[Sequence]:
        """Enough of the least urgent and newest; empty if it has room anyway, or too little even so.

        Free seats and blocks belong to the tenant that is next, so they count only if that is its own.
        """
        prefix = self._blocks.find_prefix(urgent)
        num_seats, num_blocks = urgent.num_seats, self._blocks.num_to_admit(urgent, prefix)
        num_free_seats = self._max_num_seqs - sum(each.num_seats for each in running)
        num_free_blocks = self._pool.num_available
        if num_seats <= num_free_seats and num_blocks <= num_free_blocks:
            return []
        if self._waiting.has_waiting_before(urgent.request):
            num_free_seats, num_free_blocks = min(num_free_seats, 0), 0
        freed = _Freed(self._pool, frozenset(prefix))
        chosen: list[Sequence] = []
        for each in sorted(ripe, key=dispensability, reverse=True):
            chosen.append(each)
            freed.add(each)
            if num_seats <= num_free_seats + freed.num_seats and num_blocks <= num_free_blocks + freed.num_blocks:
                return chosen
        return []

    def _ready(self, urgent: Sequence, victims: list[Sequence], overtaken: list[Sequence]) -> Way | None:
        """None if its adapter cannot be used in this step; then it is being loaded."""
        is_cold = self._adapters.is_cold(urgent)
        try:
            if not self._adapters.try_acquire(urgent, 0):
                return None
        except AdapterError as error:
            return Way(urgent, [], [], error=error.message)
        self._adapters.release(urgent)
        return Way(urgent, victims, overtaken, is_cold)


def dispensability(sequence: Sequence) -> tuple[int, int]:
    """Sort key: among sequences of one tenant, the largest is the first to preempt."""
    return sequence.request.priority, sequence.admitted
