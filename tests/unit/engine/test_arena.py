import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loraserve.engine.arena import Extents

ARENA = 24


def test_takes_the_lowest_extent_that_is_large_enough() -> None:
    extents = Extents(10)
    starts = [extents.try_allocate(size) for size in (2, 3, 2, 3)]
    extents.free(0, 2)
    extents.free(5, 2)
    assert starts == [0, 2, 5, 7]
    assert [extents.try_allocate(size) for size in (1, 2, 1)] == [0, 5, 1]


def test_allocates_nothing_when_space_is_scattered_but_all_after_reset() -> None:
    extents = Extents(10)
    for size in (2, 6, 2):
        extents.try_allocate(size)
    extents.free(0, 2)
    extents.free(8, 2)
    assert extents.num_free == 4
    assert extents.try_allocate(4) is None
    extents.reset(6)
    assert extents.try_allocate(4) == 6
    assert extents.num_free == 0


def test_an_empty_arena_gives_nothing() -> None:
    assert Extents(0).try_allocate(1) is None


def test_a_full_arena_after_reset_gives_nothing() -> None:
    extents = Extents(4)
    extents.reset(4)
    assert extents.num_free == 0
    assert extents.try_allocate(1) is None


@pytest.mark.parametrize(("start", "size"), [(0, 2), (1, 2), (3, 1), (2, 4)])
def test_freeing_what_is_free_is_a_bug(start: int, size: int) -> None:
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
    """Against a model that is a list of units."""

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

    @rule()
    def compact(self) -> None:
        sizes = {key: size for key, (_, size) in sorted(self.live.items(), key=lambda item: item[1])}
        self.owner, self.live = [None] * ARENA, {}
        end = 0
        for key, size in sizes.items():
            self._place(key, end, size)
            end += size
        self.extents.reset(end)

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
def test_space_freed_in_any_order_is_whole_again(order: list[int]) -> None:
    extents = Extents(16)
    starts = [extents.try_allocate(2) for _ in range(8)]
    for i in order:
        start = starts[i]
        assert start is not None
        extents.free(start, 2)
    assert extents.try_allocate(16) == 0
