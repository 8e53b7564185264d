import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loraserve.engine.adapters.extents import Extents

ARENA = 24


def test_allocation_takes_the_lowest_extent_that_is_large_enough() -> None:
    extents = Extents(10)
    starts = [extents.try_allocate(size) for size in (2, 3, 2, 3)]
    extents.free(0, 2)
    extents.free(5, 2)
    assert starts == [0, 2, 5, 7]
    assert [extents.try_allocate(size) for size in (1, 2, 1)] == [0, 5, 1]


def test_scattered_space_cannot_be_allocated_until_it_is_joined() -> None:
    extents = Extents(10)
    for size in (2, 6, 2):
        extents.try_allocate(size)
    extents.free(0, 2)
    extents.free(8, 2)
    assert extents.num_free == 4
    assert extents.try_allocate(4) is None
    assert extents.cheapest_span(4) == (0, 10)
    extents.join(0, 10)
    assert extents.try_allocate(4) == 6
    assert extents.num_free == 0


@pytest.mark.parametrize(("size", "span"), [(2, (0, 2)), (3, (4, 8)), (4, (0, 8)), (5, (0, 8)), (6, (0, 16))])
def test_cheapest_span_has_the_fewest_units_in_use(size: int, span: tuple[int, int]) -> None:
    """Free: [0, 2), [4, 5), [6, 8) and [15, 16)."""
    extents = Extents(16)
    extents.try_allocate(16)
    for start, free_size in ((0, 2), (4, 1), (6, 2), (15, 1)):
        extents.free(start, free_size)
    assert extents.cheapest_span(size) == span


def test_an_empty_arena_allocates_nothing() -> None:
    assert Extents(0).try_allocate(1) is None


@pytest.mark.parametrize(("start", "size"), [(0, 2), (1, 2), (3, 1), (2, 4)])
def test_freeing_free_space_is_a_bug(start: int, size: int) -> None:
    extents = Extents(8)
    extents.try_allocate(8)
    extents.free(0, 4)
    with pytest.raises(AssertionError, match="freed twice"):
        extents.free(start, size)


@pytest.mark.parametrize(("start", "size"), [(-1, 2), (7, 2)])
def test_freeing_outside_the_arena_is_a_bug(start: int, size: int) -> None:
    extents = Extents(8)
    extents.try_allocate(8)
    with pytest.raises(AssertionError, match="outside"):
        extents.free(start, size)


class ExtentsMachine(RuleBasedStateMachine):
    """Compares `Extents` with a model: a list with the owner of each unit."""

    def __init__(self) -> None:
        super().__init__()
        self.extents = Extents(ARENA)
        self.owner: list[int | None] = [None] * ARENA
        self.live: dict[int, tuple[int, int]] = {}
        self.num_allocated = 0

    @rule(size=st.integers(1, ARENA))
    def allocate(self, size: int) -> None:
        fitting = [s for s in range(ARENA - size + 1) if all(o is None for o in self.owner[s : s + size])]
        start = self.extents.try_allocate(size)
        assert start == (fitting[0] if fitting else None)
        if start is not None:
            self.num_allocated += 1
            self._place(self.num_allocated, start, size)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.live)))
        start, size = self.live.pop(key)
        self.extents.free(start, size)
        self.owner[start : start + size] = [None] * size

    @precondition(lambda self: self.extents.num_free)
    @rule(data=st.data())
    def compact(self, data: st.DataObject) -> None:
        size = data.draw(st.integers(1, self.extents.num_free))
        start, end = self.extents.cheapest_span(size)
        assert end - start - (num_free := self.owner[start:end].count(None)) == self._least_in_use(size)
        assert num_free >= size
        moved = sorted((at, key) for key, (at, _) in self.live.items() if start <= at < end)
        self.owner[start:end] = [None] * (end - start)
        place = start
        for _, key in moved:
            length = self.live[key][1]
            self._place(key, place, length)
            place += length
        self.extents.join(start, end)

    def _least_in_use(self, size: int) -> int:
        """The fewest units in use over all spans with `size` units free that cut no extent in use."""
        edges = [0, *(i for i in range(1, ARENA) if self.owner[i] != self.owner[i - 1] or self.owner[i] is None), ARENA]
        spans = [self.owner[a:b] for a in edges for b in edges if a < b]
        return min(len(span) - span.count(None) for span in spans if span.count(None) >= size)

    def _place(self, key: int, start: int, size: int) -> None:
        self.live[key] = (start, size)
        self.owner[start : start + size] = [key] * size

    @invariant()
    def free_space_agrees(self) -> None:
        assert self.extents.num_free == self.owner.count(None)


TestExtentsMachine = ExtentsMachine.TestCase
TestExtentsMachine.settings = settings(derandomize=True, deadline=None, max_examples=60, stateful_step_count=30)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.permutations(range(8)))
def test_space_freed_in_any_order_is_contiguous_again(order: list[int]) -> None:
    extents = Extents(16)
    starts = [extents.try_allocate(2) for _ in range(8)]
    for i in order:
        start = starts[i]
        assert start is not None
        extents.free(start, 2)
    assert extents.try_allocate(16) == 0
