import pytest

from loraserve.engine.kv.blocks import BlockHash, block_hash
from loraserve.engine.kv.states import StatePool
from loraserve.engine.request import EngineRequest, SamplingParams
from loraserve.engine.scheduling.plan import ScheduledSequence
from loraserve.engine.scheduling.sequence import RequestState, Sequence
from loraserve.engine.scheduling.sequence_states import (
    MAX_UNKNOWN_STATES,
    MIN_SHARED_TOKENS,
    UNCERTAIN_TOKENS,
    SequenceStates,
)

BLOCK_SIZE = 16
LONG = 50 * BLOCK_SIZE


@pytest.fixture
def pool() -> StatePool:
    return StatePool(24, 4)


@pytest.fixture
def states(pool: StatePool) -> SequenceStates:
    return SequenceStates(pool, BLOCK_SIZE, saves=True)


def hashes_of(num_blocks: int, root: bytes = b"") -> list[BlockHash]:
    """Of the first blocks of the tokens 0, 1, 2, ..."""
    hashes = []
    for i in range(num_blocks):
        root = block_hash(root, range(i * BLOCK_SIZE, (i + 1) * BLOCK_SIZE))
        hashes.append(root)
    return hashes


def sequence(num_prompt_tokens: int, root: bytes = b"") -> Sequence:
    """It has the hashes of all blocks that it may ever have."""
    request = EngineRequest("r", list(range(num_prompt_tokens)), SamplingParams(max_tokens=LONG))
    found = Sequence(RequestState(request, 0.0, root), 0, list(range(num_prompt_tokens)), num_prompt_tokens)
    found.block_hashes = hashes_of(LONG // BLOCK_SIZE, root)
    return found


def entered(states: SequenceStates, num_prompt_tokens: int, num_blocks: int = 0, root: bytes = b"") -> Sequence:
    """A running sequence that continues after `num_blocks` blocks."""
    found = sequence(num_prompt_tokens, root)
    states.enter(found, num_blocks)
    found.num_computed_tokens = num_blocks * BLOCK_SIZE
    return found


def compute(states: SequenceStates, computed: Sequence, num_rows: int) -> int | None:
    """Compute rows; returns how many tokens led to the state that is saved, or None."""
    item = ScheduledSequence(computed, num_rows, 1)
    states.plan_save(item)
    start = computed.num_computed_tokens
    computed.num_computed_tokens += num_rows
    if item.save_slot < 0:
        return None
    assert 0 < item.num_rows_saved <= num_rows
    assert computed.states_to_save[-1][1] == item.save_slot
    return start + item.num_rows_saved


def compute_all(states: SequenceStates, computed: Sequence, step_rows: int = LONG) -> None:
    """Compute the prompt in steps of `step_rows` rows, and get a token."""
    while left := computed.num_prompt_tokens - computed.num_computed_tokens:
        compute(states, computed, states.limit_rows(computed, min(left, step_rows)))
    states.remember(computed)


def positions(pool: StatePool, root: bytes = b"") -> list[int]:
    """Numbers of tokens after which a state is found."""
    hashes = hashes_of(LONG // BLOCK_SIZE, root)
    return [(i + 1) * BLOCK_SIZE for i in range(len(hashes)) if pool.num_blocks_to_skip(hashes[i : i + 1])]


# ---- where states are saved


def test_a_state_is_saved_after_the_last_full_block_of_each_part_of_a_prompt(states: SequenceStates) -> None:
    found = entered(states, 200)
    parts = (10, 30, 2, 6, 17, 40, 1)
    assert [compute(states, found, num_rows) for num_rows in parts] == [None, 32, None, 48, 64, 96, None]


@pytest.mark.parametrize(
    ("num_prompt_tokens", "expected"),
    [
        (BLOCK_SIZE + UNCERTAIN_TOKENS - 1, None),
        (BLOCK_SIZE + UNCERTAIN_TOKENS, 16),
        (6 * BLOCK_SIZE + UNCERTAIN_TOKENS - 1, 80),
        (6 * BLOCK_SIZE + UNCERTAIN_TOKENS, 96),
    ],
)
def test_no_state_is_saved_after_a_prompts_last_tokens(
    states: SequenceStates, num_prompt_tokens: int, expected: int | None
) -> None:
    assert compute(states, entered(states, num_prompt_tokens), num_prompt_tokens) == expected
    parted = entered(states, num_prompt_tokens)
    compute(states, parted, num_prompt_tokens - 3)
    assert compute(states, parted, 3) is None


def test_states_of_a_prompt_are_found_once_it_has_a_token(states: SequenceStates, pool: StatePool) -> None:
    found = entered(states, 100)
    compute(states, found, 50)
    compute(states, found, 50)
    assert positions(pool) == []
    states.remember(found)
    assert positions(pool) == [48, 80]
    assert found.states_to_save == []
    states.check_invariants([found])


def test_a_state_after_each_full_block_of_an_output_replaces_the_one_before(
    states: SequenceStates, pool: StatePool
) -> None:
    found = entered(states, 40)
    compute_all(states, found)
    assert positions(pool) == [32]
    for num_computed in range(41, 100):
        saved = compute(states, found, 1)
        assert saved == (num_computed if num_computed % BLOCK_SIZE == 0 else None)
        states.remember(found)
        of_output = [num_computed // BLOCK_SIZE * BLOCK_SIZE] if num_computed >= 48 else []
        assert positions(pool) == [32, *of_output]
    states.check_invariants([found])


def test_two_outputs_with_the_same_tokens_share_a_state(states: SequenceStates, pool: StatePool) -> None:
    first, second = entered(states, 40), entered(states, 40)
    for each in (first, second):
        compute_all(states, each)
        compute(states, each, 8)
        states.remember(each)
    assert positions(pool) == [32, 48]
    compute(states, second, 16)
    states.remember(second)
    assert positions(pool) == [32, 64]
    compute(states, first, 16)
    states.remember(first)
    assert positions(pool) == [32, 64]
    states.check_invariants([first, second])


def test_a_block_that_begins_in_the_prompt_is_the_outputs(states: SequenceStates, pool: StatePool) -> None:
    """A prompt that ends with a block, or within it, has no state of its own there."""
    for num_prompt_tokens in (48, 60):
        found = entered(states, num_prompt_tokens, root=bytes([num_prompt_tokens]))
        compute_all(states, found)
        compute(states, found, 64 - num_prompt_tokens)
        states.remember(found)
        compute(states, found, 16)
        states.remember(found)
    assert positions(pool, bytes([48])) == [32, 80]
    assert positions(pool, bytes([60])) == [48, 80]


def test_without_a_prefix_cache_nothing_is_saved(pool: StatePool) -> None:
    states = SequenceStates(pool, BLOCK_SIZE, saves=False)
    found = entered(states, 100)
    found.num_shared_tokens = 64
    assert states.limit_rows(found, 100) == 100
    assert compute(states, found, 100) is None
    assert compute(states, found, 12) is None
    assert pool.num_ever_allocated == 1


def test_without_recurrent_states_every_cached_block_counts() -> None:
    states = SequenceStates(None, BLOCK_SIZE, saves=True)
    assert not states.saves
    found, child = sequence(200), sequence(200)
    assert states.limit_prefix(found, hashes_of(12)) == 12
    states.enter(found, 12)
    states.share(found, child)
    assert (found.state_slot, child.state_slot, found.num_shared_tokens) == (-1, -1, 0)
    assert compute(states, found, 200) is None
    states.release(found)
    assert states.take_copies() == []


# ---- where two prompts begin to differ


def test_only_blocks_up_to_a_saved_state_are_skipped(states: SequenceStates) -> None:
    compute_all(states, entered(states, 100), 50)
    found = sequence(200)
    assert [states.limit_prefix(found, hashes_of(count)) for count in range(8)] == [0, 0, 0, 3, 3, 5, 5, 5]


@pytest.mark.parametrize(("num_lost", "is_noted"), [(MIN_SHARED_TOKENS - BLOCK_SIZE, False), (MIN_SHARED_TOKENS, True)])
def test_the_end_of_a_shared_beginning_is_noted_if_it_is_long_enough(
    states: SequenceStates, num_lost: int, is_noted: bool
) -> None:
    compute_all(states, entered(states, 90))
    shared = 80 + num_lost
    found = sequence(400)
    found.num_shared_tokens = 32  # noted earlier
    assert states.limit_prefix(found, hashes_of(shared // BLOCK_SIZE)) == 5
    assert found.num_shared_tokens == (shared if is_noted else 0)


def test_a_step_ends_where_a_prompt_begins_to_differ(states: SequenceStates) -> None:
    found = entered(states, 400)
    found.num_shared_tokens = 160
    assert states.limit_rows(found, 159) == 159
    assert states.limit_rows(found, 160) == 160
    assert states.limit_rows(found, 161) == 161, "the last full block ends there"
    assert states.limit_rows(found, 400) == 160
    assert compute(states, found, 100) == 96
    assert states.limit_rows(found, 300) == 60
    assert compute(states, found, 60) == 160
    assert states.limit_rows(found, 240) == 240
    assert compute(states, found, 240) == 384


def test_a_step_does_not_end_early_if_its_own_state_is_the_shared_one(states: SequenceStates) -> None:
    found = entered(states, 175)
    found.num_shared_tokens = 160
    assert states.limit_rows(found, 175) == 175
    assert compute(states, found, 175) == 160


def test_a_shared_state_is_saved_even_after_a_prompts_last_tokens(states: SequenceStates) -> None:
    """Another prompt has already been seen to go on from there."""
    found = entered(states, 164)
    found.num_shared_tokens = 160
    assert states.limit_rows(found, 164) == 160
    assert compute(states, found, 160) == 160
    assert compute(states, found, 4) is None


def test_the_third_prompt_with_a_shared_beginning_is_a_hit(states: SequenceStates, pool: StatePool) -> None:
    compute_all(states, entered(states, 400))
    second = sequence(300, b"other")
    second.block_hashes[:7] = hashes_of(7)
    assert states.limit_prefix(second, hashes_of(7)) == 0
    states.enter(second, 0)
    compute_all(states, second)
    assert positions(pool) == [112, 384]
    assert states.limit_prefix(sequence(200), hashes_of(7)) == 7


# ---- a prompt in many parts


def test_a_prompt_in_many_parts_uses_its_own_slots_again(states: SequenceStates, pool: StatePool) -> None:
    other = entered(states, 12 * BLOCK_SIZE, root=b"other")
    compute_all(states, other)
    found = entered(states, 30 * BLOCK_SIZE)
    compute_all(states, found, BLOCK_SIZE)
    last = 29 * BLOCK_SIZE
    assert positions(pool) == [last - i * BLOCK_SIZE for i in range(MAX_UNKNOWN_STATES - 1, -1, -1)]
    assert pool.num_ever_allocated == 3 + MAX_UNKNOWN_STATES
    assert positions(pool, b"other") == [11 * BLOCK_SIZE]
    states.check_invariants([other, found])


def test_a_prompt_in_many_parts_keeps_the_state_that_others_may_continue(
    states: SequenceStates, pool: StatePool
) -> None:
    found = entered(states, 30 * BLOCK_SIZE)
    found.num_shared_tokens = 2 * BLOCK_SIZE
    compute_all(states, found, BLOCK_SIZE)
    last = 29 * BLOCK_SIZE
    assert positions(pool) == [32, *(last - i * BLOCK_SIZE for i in range(MAX_UNKNOWN_STATES - 2, -1, -1))]
    assert pool.num_ever_allocated == 1 + MAX_UNKNOWN_STATES


@pytest.mark.parametrize(("num_spare", "expected"), [(0, []), (1, [464]), (2, [32, 464]), (3, [32, 448, 464])])
def test_a_prompt_in_many_parts_keeps_its_last_state_where_few_slots_are_left(
    num_spare: int, expected: list[int]
) -> None:
    pool = StatePool(1 + num_spare, 1)
    states = SequenceStates(pool, BLOCK_SIZE, saves=True)
    found = entered(states, 30 * BLOCK_SIZE)
    found.num_shared_tokens = 2 * BLOCK_SIZE
    compute_all(states, found, BLOCK_SIZE)
    assert positions(pool) == expected
    states.check_invariants([found])


# ---- slots of sequences


def test_a_sequence_continues_from_a_copy_of_a_saved_state(states: SequenceStates, pool: StatePool) -> None:
    compute_all(states, entered(states, 100), 50)
    assert states.take_copies() == []
    slots = [pool.use(hashes_of(5)[count - 1]) for count in (5, 3)]
    found, other = entered(states, 200, 5), entered(states, 200, 3)
    assert states.take_copies() == [(slots[0], found.state_slot), (slots[1], other.state_slot)]
    assert states.take_copies() == []
    assert positions(pool) == [48, 80]


def test_a_state_that_is_continued_becomes_the_most_recently_used() -> None:
    pool = StatePool(5, 2)
    states = SequenceStates(pool, BLOCK_SIZE, saves=True)
    first = entered(states, 100)
    compute_all(states, first, 50)
    states.release(first)
    entered(states, 100, 3)
    entered(states, 100)
    assert pool.try_allocate() is not None
    assert positions(pool) == [48, 80]
    assert pool.try_allocate() is not None
    assert positions(pool) == [48]


def test_a_sequence_may_take_over_the_slot_of_the_state_that_it_continues() -> None:
    pool = StatePool(3, 2)
    states = SequenceStates(pool, BLOCK_SIZE, saves=True)
    first = entered(states, 30)
    compute_all(states, first)
    states.release(first)
    other, held, source = entered(states, 30), pool.try_allocate(), pool.use(hashes_of(1)[0])
    found = entered(states, 100, 1)
    assert found.state_slot == source
    assert states.take_copies() == [], "it is there already"
    assert positions(pool) == []
    assert {other.state_slot, held, source} == {0, 1, 2}


def test_a_forked_sequence_gets_a_copy_of_its_parents_state(states: SequenceStates) -> None:
    parent, child = entered(states, 20), sequence(20)
    compute(states, parent, 20)
    states.share(parent, child)
    assert states.take_copies() == [(parent.state_slot, child.state_slot)]
    assert parent.state_slot != child.state_slot
    states.check_invariants([parent, child])


def test_a_child_takes_over_its_parents_slot_and_saved_states(states: SequenceStates, pool: StatePool) -> None:
    parent, child = entered(states, 40), sequence(40)
    compute(states, parent, 40)
    slot = parent.state_slot
    states.hand_over(parent, child)
    states.release(parent)
    assert (parent.state_slot, child.state_slot) == (-1, slot)
    assert states.take_copies() == []
    states.check_invariants([child])
    states.remember(child)
    assert positions(pool) == [32]


def test_released_states_are_free_unless_others_can_find_them(states: SequenceStates, pool: StatePool) -> None:
    found = entered(states, 100)
    compute_all(states, found)
    compute(states, found, 12)
    states.release(found)
    assert (found.state_slot, found.states_to_save) == (-1, [])
    states.check_invariants([])
    assert positions(pool) == [80]
    states.release(found)
    states.check_invariants([])


def test_a_preempted_output_does_not_replace_what_it_saved_before(states: SequenceStates, pool: StatePool) -> None:
    """By then, another sequence may have saved that state."""
    found = entered(states, 40)
    compute_all(states, found)
    compute(states, found, 8)
    states.remember(found)
    states.release(found)
    found.num_computed_tokens = 32
    states.enter(found, 2)
    compute(states, found, 32)
    states.remember(found)
    assert positions(pool) == [32, 48, 64]


def test_a_slot_with_two_holders_is_noticed(states: SequenceStates) -> None:
    parent, child = entered(states, 20), sequence(20)
    child.state_slot = parent.state_slot
    with pytest.raises(AssertionError, match="two holders"):
        states.check_invariants([parent, child])
    parent.states_to_save = [(1, 5)]
    with pytest.raises(AssertionError, match="two holders"):
        states.check_invariants([parent])
