import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loraserve.engine.kv.blocks import BlockCounts, BlockHash, BlockPool, block_hash, root_hash

HASHES = [bytes([i]) * 32 for i in range(6)]

field = st.one_of(st.none(), st.text(alphabet="abslor\x00\x01é", max_size=6))
triple = st.tuples(st.text(alphabet="abslor\x00\x01é", max_size=6), st.text(max_size=3), field)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(triple, triple)
@example(("ab", "", ""), ("a", "b", ""))
@example(("a", "", "b"), ("b", "", "a"))
@example(("x", "", None), ("x", "", ""))
@example(("", "m", "d"), ("d", "m", ""))
@example(("", "lora", None), ("lora", "", None))
def test_roots_are_equal_only_for_equal_salt_base_and_adapter(
    a: tuple[str, str, str | None], b: tuple[str, str, str | None]
) -> None:
    assert (root_hash(*a) == root_hash(*b)) == (a == b)


def test_moving_characters_between_fields_changes_the_root() -> None:
    text = "salt-base-lora"
    cuts = [(text[:i], text[i:j], text[j:]) for i in range(len(text) + 1) for j in range(i, len(text) + 1)]
    cuts += [(a, b, None) for a, b, c in cuts if c == ""]
    assert len({root_hash(*cut) for cut in cuts}) == len(cuts)


chain = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=2), max_size=3)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.sampled_from(["s", "t"]), chain, st.sampled_from(["s", "t"]), chain)
def test_a_block_hash_identifies_the_salt_and_all_tokens_up_to_its_end(
    salt_a: str, chain_a: list[list[int]], salt_b: str, chain_b: list[list[int]]
) -> None:
    hash_a, hash_b = root_hash(salt_a, "m", None), root_hash(salt_b, "m", None)
    for tokens in chain_a:
        hash_a = block_hash(hash_a, tokens)
    for tokens in chain_b:
        hash_b = block_hash(hash_b, tokens)
    assert (hash_a == hash_b) == ((salt_a, chain_a) == (salt_b, chain_b))


def test_block_hashes_distinguish_token_ids_of_any_size_and_order() -> None:
    root = root_hash("", "", None)
    sequences = [[1, 2], [2, 1], [1, 1 << 8], [1 << 8, 1], [1, 1 << 32], [(1 << 62) + 1, 0], [0, 1], [0, 256]]
    assert len({block_hash(root, tokens) for tokens in sequences}) == len(sequences)


def test_allocates_all_or_nothing() -> None:
    pool = BlockPool(3)
    assert pool.try_allocate(4) is None
    assert pool.counts() == BlockCounts(3, 0, 0)
    assert pool.try_allocate(0) == []
    assert sorted(pool.try_allocate(3) or []) == [0, 1, 2]
    assert pool.try_allocate(1) is None


def test_blocks_never_allocated_have_the_highest_ids_and_are_used_after_all_free_ones() -> None:
    pool = BlockPool(5)
    assert pool.num_ever_allocated == 0
    blocks = pool.try_allocate(3) or []
    assert pool.num_ever_allocated == 3
    pool.release(blocks)
    assert pool.num_ever_allocated == 3
    assert sorted(pool.try_allocate(2) or []) == [0, 1]
    assert pool.num_ever_allocated == 3
    assert pool.try_allocate(4) is None
    assert pool.num_ever_allocated == 3
    assert sorted(pool.try_allocate(2) or []) == [2, 3]
    assert pool.num_ever_allocated == 4


def test_finds_the_longest_known_prefix_and_nothing_after_a_gap() -> None:
    pool = BlockPool(3)
    blocks = pool.try_allocate(3) or []
    for block, value in zip(blocks, HASHES, strict=False):
        pool.remember(block, value)
    assert pool.match_prefix(HASHES) == blocks
    pool.forget([blocks[1]])
    assert pool.match_prefix(HASHES) == blocks[:1]


def test_evicts_the_tail_of_the_least_recently_used_sequence_first() -> None:
    pool = BlockPool(4)
    old, new = pool.try_allocate(2) or [], pool.try_allocate(2) or []
    for block, value in zip(old + new, HASHES, strict=False):
        pool.remember(block, value)
    pool.release(old)
    pool.release(new)
    assert [pool.try_allocate(1) for _ in range(4)] == [[old[1]], [old[0]], [new[1]], [new[0]]]


def test_acquiring_a_cached_block_keeps_it_from_eviction() -> None:
    pool = BlockPool(2)
    blocks = pool.try_allocate(2) or []
    pool.remember(blocks[0], HASHES[0])
    pool.release(blocks)
    assert pool.num_evictable([blocks[0]]) == 1
    pool.acquire([blocks[0]])
    assert pool.num_evictable([blocks[0]]) == 0
    assert pool.try_allocate(2) is None
    assert pool.try_allocate(1) == [blocks[1]]


def test_an_evicted_block_is_no_longer_found() -> None:
    pool = BlockPool(1)
    blocks = pool.try_allocate(1) or []
    pool.remember(blocks[0], HASHES[0])
    pool.release(blocks)
    pool.try_allocate(1)
    assert pool.match_prefix(HASHES) == []


def test_the_first_block_remembered_for_a_hash_stays_the_one_found() -> None:
    pool = BlockPool(2)
    first, second = pool.try_allocate(2) or []
    pool.remember(first, HASHES[0])
    pool.remember(second, HASHES[0])
    pool.release([second])
    assert pool.counts() == BlockCounts(1, 0, 1)
    assert pool.match_prefix(HASHES) == [first]


def test_forgotten_blocks_are_free_when_released() -> None:
    pool = BlockPool(2)
    blocks = pool.try_allocate(2) or []
    pool.remember(blocks[0], HASHES[0])
    pool.forget(blocks)
    pool.release(blocks)
    assert pool.counts() == BlockCounts(2, 0, 0)
    assert pool.match_prefix(HASHES) == []


def test_remembers_nothing_with_caching_off() -> None:
    pool = BlockPool(1, enable_caching=False)
    blocks = pool.try_allocate(1) or []
    pool.remember(blocks[0], HASHES[0])
    pool.release(blocks)
    assert pool.counts() == BlockCounts(1, 0, 0)
    assert pool.match_prefix(HASHES) == []


def test_releasing_without_a_reference_is_a_bug() -> None:
    pool = BlockPool(1)
    blocks = pool.try_allocate(1) or []
    pool.release(blocks)
    with pytest.raises(AssertionError, match="without a reference"):
        pool.release(blocks)


def test_forgetting_an_unreferenced_block_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="not referenced"):
        BlockPool(1).forget([0])


@pytest.mark.parametrize("tables", [[[0]], [[0], [0], [1], [1]], [[1]], [[0, 1, 2]], []])
def test_check_invariants_detects_references_held_by_no_table_or_by_too_many(tables: list[list[int]]) -> None:
    pool = BlockPool(4)
    pool.try_allocate(2)
    pool.acquire([0])
    pool.check_invariants([[0], [0, 1]])
    with pytest.raises(AssertionError):
        pool.check_invariants(tables)


class BlockPoolMachine(RuleBasedStateMachine):
    """Compares block tables, as sequences hold them, with a model of the block that each hash must find."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6)
        self.tables: list[list[int]] = []
        self.contents: dict[int, BlockHash] = {}
        """Hash of each findable block."""
        self.evictable: list[int] = []
        """Least recently used first."""
        self.ever_allocated: set[int] = set()

    @rule(count=st.integers(0, 7))
    def allocate(self, count: int) -> None:
        num_available = self.pool.num_available
        blocks = self.pool.try_allocate(count)
        assert (blocks is None) == (count > num_available)
        if blocks is not None:
            num_evicted = count - (num_available - len(self.evictable))
            evicted, self.evictable = self.evictable[: max(0, num_evicted)], self.evictable[max(0, num_evicted) :]
            assert set(evicted) <= set(blocks), "evicted out of order, or though blocks were free"
            for block in blocks:
                self.contents.pop(block, None)
            self.tables.append(blocks)
            self.ever_allocated |= set(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.pool.acquire(table)
        self.tables.append(list(table))
        assert all(self.pool.is_shared(block) for block in table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        held = {block for other in self.tables for block in other}
        self.evictable += [block for block in reversed(table) if block not in held and block in self.contents]

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), value=st.sampled_from(HASHES))
    def remember(self, data: st.DataObject, value: BlockHash) -> None:
        block = data.draw(st.sampled_from([block for table in self.tables for block in table]))
        self.pool.remember(block, value)
        if block not in self.contents and value not in self.contents.values():
            self.contents[block] = value

    @rule(values=st.lists(st.sampled_from(HASHES), unique=True))
    def find_and_acquire(self, values: list[BlockHash]) -> None:
        blocks = self.pool.match_prefix(values)
        assert [self.contents[block] for block in blocks] == values[: len(blocks)]
        assert len(blocks) == len(values) or values[len(blocks)] not in self.contents.values()
        num_available = self.pool.num_available
        num_evictable = self.pool.num_evictable(blocks)
        self.pool.acquire(blocks)
        assert self.pool.num_available == num_available - num_evictable
        self.evictable = [block for block in self.evictable if block not in blocks]
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.pool.forget(table)
        for block in table:
            self.contents.pop(block, None)

    @invariant()
    def no_block_is_lost_or_made_up(self) -> None:
        self.pool.check_invariants(self.tables)
        assert self.ever_allocated == set(range(self.pool.num_ever_allocated))
        counts = self.pool.counts()
        held = {block for table in self.tables for block in table}
        assert counts == BlockCounts(6 - len(held) - len(self.evictable), len(self.evictable), len(held))

    def teardown(self) -> None:
        for table in self.tables:
            self.pool.release(table)
        counts = self.pool.counts()
        assert counts.referenced == 0
        assert counts.cached == len(self.contents)


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(derandomize=True, deadline=None, max_examples=80, stateful_step_count=40)


def test_every_small_history_of_two_tables_conserves_blocks() -> None:
    """Exhaustive: 3 blocks, tables of 1 or 2, every sequence of six allocate, share, remember, release steps."""
    steps = ("allocate", "allocate2", "share", "remember", "release", "release_first")
    seen = set()
    frontier: list[tuple[str, ...]] = [()]
    for _ in range(6):
        frontier = [(*history, step) for history in frontier for step in steps]
        for history in frontier:
            seen.add(_replay(history))
    assert max(len(tables) for tables in seen) == 6


def _replay(history: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    pool = BlockPool(3)
    tables: list[list[int]] = []
    for i, step in enumerate(history):
        if step.startswith("allocate"):
            blocks = pool.try_allocate(2 if step == "allocate2" else 1)
            if blocks:
                tables.append(blocks)
        elif tables and step == "share":
            pool.acquire(tables[-1])
            tables.append(list(tables[-1]))
        elif tables and step == "remember":
            pool.remember(tables[-1][-1], HASHES[i])
        elif tables and step == "release":
            pool.release(tables.pop())
        elif tables:
            pool.release(tables.pop(0))
    pool.check_invariants(tables)
    return tuple(tuple(table) for table in tables)
