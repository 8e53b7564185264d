import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loraserve.engine.kv.blocks import BlockHash, BlockPool, root_hash
from loraserve.engine.request import EngineRequest, SamplingParams
from loraserve.engine.scheduling.sequence import RequestState, Sequence
from loraserve.engine.scheduling.sequence_blocks import SequenceBlocks

BLOCK_SIZE = 4


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(4)


@pytest.fixture
def blocks(pool: BlockPool) -> SequenceBlocks:
    return SequenceBlocks(pool, BLOCK_SIZE)


def sequence(num_tokens: int, num_computed: int = 0) -> Sequence:
    request = EngineRequest("r", list(range(num_tokens)), SamplingParams(max_tokens=9))
    return Sequence(RequestState(request, 0.0, b""), 0, list(range(num_tokens)), num_tokens, num_computed)


def extended(blocks: SequenceBlocks, num_tokens: int) -> Sequence:
    """A sequence with blocks for all of its tokens, all computed."""
    found = sequence(num_tokens)
    assert blocks.try_extend(found, num_tokens, [])
    found.num_computed_tokens = num_tokens
    return found


def test_extending_allocates_only_the_missing_blocks(blocks: SequenceBlocks) -> None:
    found = sequence(20)
    for num_rows, num_blocks in ((3, 1), (1, 1), (1, 2), (8, 4)):
        assert blocks.try_extend(found, num_rows, [])
        assert len(found.blocks) == num_blocks
        found.num_computed_tokens += num_rows


def test_a_shared_block_is_copied_before_it_is_written(blocks: SequenceBlocks, pool: BlockPool) -> None:
    parent, child = extended(blocks, 6), sequence(6, 6)
    blocks.share(parent, child)
    shared, copies = list(parent.blocks), []
    assert blocks.try_extend(child, 1, copies)
    assert copies == [(shared[1], child.blocks[1])]
    assert child.blocks[0] == shared[0]
    assert parent.blocks == shared
    pool.check_invariants([parent.blocks, child.blocks])


@pytest.mark.parametrize("is_shared", [False, True])
def test_extending_changes_nothing_if_there_are_too_few_blocks(
    blocks: SequenceBlocks, pool: BlockPool, is_shared: bool
) -> None:
    found, other = extended(blocks, 6), sequence(6, 6)
    if is_shared:
        blocks.share(found, other)
    pool.try_allocate(2)
    before, copies = list(found.blocks), []
    assert not blocks.try_extend(found, 1 if is_shared else 8, copies)
    assert (found.blocks, copies) == (before, [])


def test_either_all_sequences_are_extended_by_a_row_or_none(blocks: SequenceBlocks, pool: BlockPool) -> None:
    full, partial = extended(blocks, 4), extended(blocks, 3)
    assert blocks.try_extend_all([full, partial])
    assert (len(full.blocks), len(partial.blocks)) == (2, 1)
    other = extended(blocks, 4)
    full.num_computed_tokens = 8
    before = pool.counts()
    assert not blocks.try_extend_all([other, partial, full])
    assert pool.counts() == before
    assert (len(full.blocks), len(other.blocks)) == (2, 1)


def test_no_sequence_is_extended_if_a_block_must_be_copied(blocks: SequenceBlocks, pool: BlockPool) -> None:
    full, parent, child = extended(blocks, 4), extended(blocks, 3), sequence(3, 3)
    blocks.share(parent, child)
    before = pool.counts()
    assert not blocks.try_extend_all([full, parent, child])
    assert pool.counts() == before
    assert len(full.blocks) == 1


def test_remembered_full_blocks_are_found_but_never_the_whole_prompt(blocks: SequenceBlocks) -> None:
    first = extended(blocks, 10)
    assert blocks.find_prefix(sequence(10)) == []
    blocks.remember(first)
    assert blocks.find_prefix(sequence(10)) == first.blocks[:2]
    assert blocks.find_prefix(sequence(8)) == first.blocks[:1]


def test_released_blocks_stay_findable_until_they_are_reused(blocks: SequenceBlocks, pool: BlockPool) -> None:
    first = extended(blocks, 10)
    blocks.remember(first)
    remembered = first.blocks[:2]
    blocks.release(first)
    assert first.blocks == []
    assert first.num_remembered_blocks == 0
    assert blocks.find_prefix(sequence(10)) == remembered
    extended(blocks, 16)
    assert blocks.find_prefix(sequence(10)) == []
    assert pool.counts().referenced == 4


Computed = tuple[list[int], str | None, int]
"""(tokens, adapter, first position that the adapter computes)."""
computed = st.one_of(
    st.tuples(st.just([1] * 12), st.just("one"), st.integers(0, 12)),
    st.tuples(st.lists(st.integers(1, 2), min_size=12, max_size=12), st.sampled_from([None, "one", "two"]), st.just(0)),
    st.tuples(st.just([1] * 12), st.just("two"), st.integers(0, 12)),
)


def hashes_of(tokens: list[int], adapter: str | None, start: int) -> list[BlockHash]:
    """Block hashes, from a root that is chosen as in the engine."""
    request = EngineRequest("r", tokens, SamplingParams(max_tokens=1), adapter_digest=adapter)
    root = root_hash("", "", None if start > 0 else adapter)
    found = Sequence(RequestState(request, 0.0, root, adapter_start=start), 0, tokens, len(tokens))
    SequenceBlocks(BlockPool(1), BLOCK_SIZE)._extend_hashes(found, len(tokens) // BLOCK_SIZE)
    return found.block_hashes


@settings(derandomize=True, deadline=None, max_examples=400)
@given(computed, computed)
@example(([1] * 12, "one", 5), ([1] * 12, "one", 6))
@example(([1] * 12, "one", 5), ([1] * 12, "two", 5))
@example(([1] * 12, "one", 8), ([1] * 12, None, 0))
def test_block_hashes_are_equal_exactly_if_the_same_adapters_compute_the_same_tokens(a: Computed, b: Computed) -> None:
    for index, (one, other) in enumerate(zip(hashes_of(*a), hashes_of(*b), strict=True)):
        end = (index + 1) * BLOCK_SIZE
        rows = [
            [(token, adapter if position >= start else None) for position, token in enumerate(tokens[:end])]
            for tokens, adapter, start in (a, b)
        ]
        assert (one == other) == (rows[0] == rows[1])
