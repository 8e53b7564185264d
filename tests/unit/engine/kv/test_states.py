import pytest

from loraserve.engine.kv.states import StatePool

A, B, C, D = (name.encode() for name in "ABCD")


def saved(pool: StatePool, *blocks: bytes) -> list[int]:
    """The slots in which states after these blocks are now saved, in that order."""
    slots = []
    for block in blocks:
        slot = pool.try_allocate()
        assert slot is not None
        pool.save(block, slot)
        slots.append(slot)
    return slots


def test_fewer_slots_than_sequences_are_a_bug() -> None:
    with pytest.raises(AssertionError, match="every running sequence needs a state"):
        StatePool(2, 3)


def test_nothing_is_saved_in_slots_that_sequences_may_need() -> None:
    pool = StatePool(3, 2)
    assert pool.try_allocate() is not None
    assert pool.try_allocate() is None
    first = pool.enter()
    assert pool.try_allocate() is None
    second = pool.enter()
    assert pool.try_allocate() is None
    pool.leave(first)
    assert pool.try_allocate() is None
    pool.leave(second)
    assert pool.try_allocate() is None


def test_slots_that_no_sequence_can_need_are_for_saved_states() -> None:
    pool = StatePool(4, 2)
    pool.enter()
    pool.enter()
    assert saved(pool, A, B) == [2, 3]
    assert pool.try_allocate() == 2, "that of a saved state"
    assert pool.num_blocks_to_skip([A]) == 0
    assert pool.num_blocks_to_skip([A, B]) == 2


def test_more_sequences_than_slots_are_reserved_for_are_a_bug() -> None:
    pool = StatePool(4, 1)
    pool.enter()
    with pytest.raises(AssertionError, match="more sequences than slots are reserved for"):
        pool.enter()


def test_the_least_recently_used_state_is_evicted_first() -> None:
    pool = StatePool(4, 1)
    slots = saved(pool, A, B, C)
    assert pool.use(A) == slots[0]
    pool.enter()
    assert saved(pool, D) == [slots[1]]
    assert [pool.num_blocks_to_skip([block]) for block in (A, B, C, D)] == [1, 0, 1, 1]
    assert pool.try_allocate() == slots[2]
    assert [pool.num_blocks_to_skip([block]) for block in (A, C, D)] == [1, 0, 1]


def test_a_free_slot_is_taken_before_a_saved_state_is_evicted() -> None:
    pool = StatePool(3, 1)
    saved(pool, A)
    pool.leave(pool.enter())
    pool.enter()
    assert pool.num_blocks_to_skip([A]) == 1


def test_a_sequence_may_enter_in_the_slot_of_the_state_that_it_continues() -> None:
    """The last one that is left: what it was going to copy is then where it needs it."""
    pool = StatePool(3, 2)
    saved(pool, A)
    held = [pool.try_allocate(), pool.enter()]
    assert pool.use(A) == pool.enter() == 0
    assert pool.num_blocks_to_skip([A]) == 0
    assert held == [1, 2]
    pool.check_invariants([0, 1, 2], 2)


def test_the_longest_prefix_with_a_saved_state_is_skipped() -> None:
    pool = StatePool(5, 1)
    saved(pool, B, D)
    assert pool.num_blocks_to_skip([]) == 0
    assert pool.num_blocks_to_skip([A]) == 0
    assert pool.num_blocks_to_skip([A, B, C]) == 2
    assert pool.num_blocks_to_skip([A, B, C, D]) == 4


def test_a_state_replaces_an_earlier_one_after_the_same_block() -> None:
    pool = StatePool(4, 1)
    earlier, later = saved(pool, A, A)
    assert earlier != later
    assert pool.use(A) == later
    assert pool.try_allocate() == earlier, "it became free"
    pool.check_invariants([earlier], 0)


def test_a_replaced_state_is_as_recent_as_a_new_one() -> None:
    pool = StatePool(4, 1)
    saved(pool, A, B, A)
    assert [pool.enter(), pool.try_allocate()] == [0, 3]
    assert pool.try_allocate() == 1
    assert [pool.num_blocks_to_skip([block]) for block in (A, B)] == [1, 0]


def test_a_forgotten_state_is_not_found_and_its_slot_is_free() -> None:
    pool = StatePool(3, 1)
    slots = saved(pool, A, B)
    pool.forget(A)
    assert pool.num_blocks_to_skip([A]) == 0
    assert pool.num_blocks_to_skip([B]) == 1
    pool.forget(A)
    assert pool.try_allocate() == slots[0]
    pool.check_invariants([slots[0]], 0)


def test_a_slot_that_is_given_back_is_free() -> None:
    pool = StatePool(2, 1)
    slot = pool.try_allocate()
    assert slot is not None
    assert pool.try_allocate() is None
    pool.give_back(slot)
    assert pool.try_allocate() == slot


def test_low_slots_come_first_and_those_above_were_never_allocated() -> None:
    pool = StatePool(6, 3)
    assert pool.num_ever_allocated == 0
    assert [pool.enter(), pool.try_allocate(), pool.enter()] == [0, 1, 2]
    assert pool.num_ever_allocated == 3
    pool.leave(0)
    assert pool.enter() == 0
    assert pool.num_ever_allocated == 3
    assert pool.enter() == 3
    assert pool.num_ever_allocated == 4


@pytest.mark.parametrize("held", [[0], [0, 1, 1], [0, 1, 2], [1, 2]])
def test_a_slot_that_is_lost_or_has_two_holders_is_noticed(held: list[int]) -> None:
    pool = StatePool(4, 2)
    assert [pool.enter(), pool.try_allocate()] == [0, 1]
    assert saved(pool, A) == [2]
    pool.check_invariants([1, 0], 1)
    with pytest.raises(AssertionError, match="slots were lost, or have two holders"):
        pool.check_invariants(held, 1)


def test_a_sequence_that_did_not_leave_is_noticed() -> None:
    pool = StatePool(2, 2)
    slot = pool.enter()
    with pytest.raises(AssertionError, match="number of sequences with a state differs"):
        pool.check_invariants([slot], 0)
