import pytest

from loraserve.engine.request import EngineRequest, SamplingParams
from loraserve.engine.scheduling.plan import ScheduledSequence
from loraserve.engine.scheduling.sequence import RequestState, Sequence
from loraserve.engine.steps.batch_builder import BatchBuilder

BLOCK_SIZE = 4


@pytest.fixture
def builder() -> BatchBuilder:
    return BatchBuilder(max_num_rows=16, max_num_seqs=4, max_blocks=5, block_size=BLOCK_SIZE)


def scheduled(
    token_ids: list[int], num_computed: int, num_rows: int, num_sampled: int, blocks: list[int], adapter_slot: int = -1
) -> ScheduledSequence:
    request = EngineRequest("r", token_ids, SamplingParams(max_tokens=1))
    sequence = Sequence(RequestState(request, 0.0, b""), 0, token_ids, len(token_ids))
    sequence.num_computed_tokens = num_computed
    sequence.blocks = blocks
    sequence.adapter_slot = adapter_slot
    return ScheduledSequence(sequence, num_rows, num_sampled)


def test_rows_of_prompts_decodes_and_chunks_follow_each_other(builder: BatchBuilder) -> None:
    batch = builder.build(
        [
            scheduled([10, 11, 12, 13, 14, 15], num_computed=2, num_rows=4, num_sampled=1, blocks=[7, 2]),
            scheduled([20, 21, 22, 23, 24], num_computed=4, num_rows=1, num_sampled=1, blocks=[3, 5]),
            scheduled([30, 31, 32, 33, 34, 35], num_computed=0, num_rows=5, num_sampled=0, blocks=[9, 8, 6]),
        ]
    )
    assert batch.token_ids.tolist() == [12, 13, 14, 15, 24, 30, 31, 32, 33, 34]
    assert batch.positions.tolist() == [2, 3, 4, 5, 4, 0, 1, 2, 3, 4]
    assert batch.slot_mapping.tolist() == [30, 31, 8, 9, 20, 36, 37, 38, 39, 32]
    assert batch.row_start.tolist() == [0, 4, 5]
    assert batch.num_rows.tolist() == [4, 1, 5]
    assert batch.context_lens.tolist() == [6, 5, 5]
    assert batch.sampled_rows.tolist() == [3, 4]
    assert [batch.block_table[i, :2].tolist() for i in range(3)] == [[7, 2], [3, 5], [9, 8]]


def test_rows_of_adapters_with_own_tables_are_listed_as_long_as_the_slot_has_any() -> None:
    own_tables = {0: {}, 5: {}}
    builder = BatchBuilder(max_num_rows=16, max_num_seqs=4, max_blocks=5, block_size=BLOCK_SIZE, own_tables=own_tables)
    sequences = [
        scheduled([1, 2, 3], 0, 2, 0, [1], adapter_slot=0),
        scheduled([1, 2, 3], 2, 1, 1, [2], adapter_slot=0),
        scheduled([1, 2], 0, 2, 1, [0], adapter_slot=1),
        scheduled([1, 2, 3], 0, 3, 2, [3], adapter_slot=5),
    ]
    batch = builder.build(sequences)
    assert batch.segments.own_table_runs == ((0, 0, 3), (5, 5, 8))
    assert batch.sampled_segments.own_table_runs == ((0, 0, 1), (5, 2, 4))
    assert batch.needs_modules
    del own_tables[0]  # another adapter has the slot
    batch = builder.build(sequences)
    assert batch.segments.own_table_runs == ((5, 5, 8),)
    own_tables.clear()
    batch = builder.build(sequences)
    assert batch.segments.own_table_runs == ()
    assert not batch.needs_modules


def test_adjacent_rows_of_one_adapter_share_a_segment(builder: BatchBuilder) -> None:
    batch = builder.build(
        [
            scheduled([1, 2], 0, 2, 1, [0], adapter_slot=-1),
            scheduled([1, 2, 3], 0, 2, 0, [1], adapter_slot=0),
            scheduled([1, 2, 3], 2, 1, 1, [2], adapter_slot=0),
            scheduled([1, 2, 3], 0, 3, 2, [3], adapter_slot=5),
        ]
    )
    assert batch.segments.start.tolist() == [0, 2, 5, 8]
    assert batch.segments.adapter_slot.tolist() == [-1, 0, 5]
    assert batch.segments.has_adapter
    assert batch.sampled_segments.start.tolist() == [0, 1, 2, 4]
    assert batch.sampled_segments.adapter_slot.tolist() == [-1, 0, 5]
    assert batch.sampled_rows.tolist() == [1, 4, 6, 7]


def test_rows_before_an_activation_use_the_base_model(builder: BatchBuilder) -> None:
    """Sampled rows too: here, all rows of the first chunk are sampled."""

    def activated(num_rows: int, num_base_rows: int, num_sampled: int, adapter_slot: int) -> ScheduledSequence:
        item = scheduled([1, 2, 3, 4], 0, num_rows, num_sampled, [0], adapter_slot)
        item.num_base_rows = num_base_rows
        return item

    batch = builder.build([activated(3, 2, 3, 1), activated(2, 2, 0, 1), activated(4, 1, 1, 1), activated(3, 3, 1, 2)])
    assert batch.segments.start.tolist() == [0, 2, 3, 6, 9, 12]
    assert batch.segments.adapter_slot.tolist() == [-1, 1, -1, 1, -1]
    assert batch.sampled_rows.tolist() == [0, 1, 2, 8, 11]
    assert batch.sampled_segments.start.tolist() == [0, 2, 4, 5]
    assert batch.sampled_segments.adapter_slot.tolist() == [-1, 1, -1]
    # The same rows, with a different split between base model and adapter, make a batch of another shape.
    again = builder.build([activated(3, 0, 3, 1), activated(2, 0, 0, 1), activated(4, 4, 1, 1), activated(3, 0, 1, 2)])
    assert again.segments.start.tolist() == [0, 5, 9, 12]
    assert again.segments.adapter_slot.tolist() == [1, -1, 2]


def test_every_sequence_can_have_both_base_model_and_adapter_rows(builder: BatchBuilder) -> None:
    items = [scheduled([1, 2, 3], 0, 2, 2, [i], adapter_slot=i) for i in range(4)]
    for item in items:
        item.num_base_rows = 1
    batch = builder.build(items)
    assert batch.segments.start.tolist() == batch.sampled_segments.start.tolist() == [*range(9)]
    assert batch.segments.adapter_slot.tolist() == [-1, 0, -1, 1, -1, 2, -1, 3]


def test_a_batch_of_the_base_model_alone_has_no_adapter(builder: BatchBuilder) -> None:
    batch = builder.build([scheduled([1], 0, 1, 1, [0]), scheduled([1, 2], 1, 1, 1, [1])])
    assert not batch.segments.has_adapter
    assert not batch.sampled_segments.has_adapter
    assert batch.segments.start.tolist() == [0, 2]


def test_sampled_rows_can_all_be_base_model_rows_beside_an_adapters_chunk(builder: BatchBuilder) -> None:
    batch = builder.build([scheduled([1], 0, 1, 1, [0]), scheduled([1, 2, 3], 0, 2, 0, [1], adapter_slot=2)])
    assert batch.segments.has_adapter
    assert not batch.sampled_segments.has_adapter


def test_a_chunk_that_samples_nothing_has_no_sampled_segments(builder: BatchBuilder) -> None:
    batch = builder.build([scheduled([1, 2, 3], 0, 2, 0, [0], adapter_slot=3)])
    assert batch.sampled_rows.tolist() == []
    assert batch.sampled_segments.start.tolist() == [0]
    assert batch.sampled_segments.adapter_slot.tolist() == []


def test_a_smaller_batch_contains_nothing_from_the_previous_one(builder: BatchBuilder) -> None:
    first = [scheduled(list(range(4)), 0, 4, 1, [i], adapter_slot=i) for i in range(4)]
    builder.build(first)
    batch = builder.build([scheduled([9], 0, 1, 1, [4], adapter_slot=1)])
    assert batch.token_ids.tolist() == [9]
    assert batch.slot_mapping.tolist() == [16]
    assert batch.segments.start.tolist() == [0, 1]
    assert batch.segments.adapter_slot.tolist() == [1]
    assert batch.sampled_rows.tolist() == [0]
    assert batch.block_table.shape == (1, 5)


def test_a_running_sequence_keeps_its_blocks_and_gains_new_ones(builder: BatchBuilder) -> None:
    item = scheduled(list(range(12)), num_computed=7, num_rows=1, num_sampled=1, blocks=[7, 2])
    sequence = item.sequence
    sequence.admitted = 1
    assert builder.build([item]).block_table[0, :2].tolist() == [7, 2]
    sequence.num_computed_tokens, sequence.blocks = 8, [7, 2, 5]
    assert builder.build([item]).block_table[0, :3].tolist() == [7, 2, 5]
    sequence.num_computed_tokens, sequence.blocks = 9, [7, 2, 6]  # a shared block was copied before it is written
    assert builder.build([item]).block_table[0, :3].tolist() == [7, 2, 6]


def test_a_sequence_admitted_again_gets_its_new_blocks(builder: BatchBuilder) -> None:
    item = scheduled(list(range(12)), num_computed=8, num_rows=1, num_sampled=1, blocks=[7, 2, 5])
    item.sequence.admitted = 1
    builder.build([item])
    item.sequence.admitted, item.sequence.blocks = 2, [1, 3, 4]
    assert builder.build([item]).block_table[0, :3].tolist() == [1, 3, 4]


def test_block_table_rows_follow_their_sequences(builder: BatchBuilder) -> None:
    first = scheduled(list(range(12)), num_computed=8, num_rows=1, num_sampled=1, blocks=[7, 2, 5])
    second = scheduled(list(range(12)), num_computed=8, num_rows=1, num_sampled=1, blocks=[1, 3, 4])
    first.sequence.admitted, second.sequence.admitted = 1, 2
    builder.build([first, second])
    assert builder.build([second]).block_table[0, :3].tolist() == [1, 3, 4]
    assert builder.build([first, second]).block_table[:, :3].tolist() == [[7, 2, 5], [1, 3, 4]]


def test_a_block_table_row_is_refilled_when_its_sequence_returns(builder: BatchBuilder) -> None:
    first = scheduled(list(range(12)), num_computed=4, num_rows=1, num_sampled=1, blocks=[7, 2])
    second = scheduled(list(range(12)), num_computed=8, num_rows=1, num_sampled=1, blocks=[1, 3, 4])
    first.sequence.admitted, second.sequence.admitted = 1, 2
    builder.build([second, first])
    first.sequence.num_computed_tokens, first.sequence.blocks = 5, [7, 5]  # a shared block was copied
    builder.build([first])
    first.sequence.num_computed_tokens, first.sequence.blocks = 8, [7, 5, 6]
    assert builder.build([second, first]).block_table[1, :3].tolist() == [7, 5, 6]


def test_a_batch_reused_for_the_same_sequences_equals_a_fresh_one(builder: BatchBuilder) -> None:
    """Across block boundaries, and then for a batch of other sequences."""
    blocks = [[7, 2, 5, 9], [1, 3, 4, 8], [6, 0, 11, 12]]
    items = [
        scheduled(
            list(range(num_computed + 1)), num_computed, num_rows=1, num_sampled=1, blocks=held, adapter_slot=slot
        )
        for num_computed, held, slot in zip((3, 4, 6), blocks, (-1, 0, 2), strict=True)
    ]
    for admitted, item in enumerate(items, 1):
        item.sequence.admitted = admitted
    batch = builder.build(items)
    for step in range(8):
        for item in items:
            item.sequence.num_computed_tokens += 1
            item.sequence.token_ids.append(100 + step)
        fresh = BatchBuilder(max_num_rows=16, max_num_seqs=4, max_blocks=5, block_size=BLOCK_SIZE)
        expected = fresh.build(items)
        assert builder.build_again(items) is batch
        for name in ("token_ids", "positions", "slot_mapping", "context_lens", "row_start", "num_rows", "sampled_rows"):
            assert getattr(batch, name).tolist() == getattr(expected, name).tolist(), name
        for row, context_len in enumerate(batch.context_lens.tolist()):
            num_blocks = -(-context_len // BLOCK_SIZE)
            assert batch.block_table[row, :num_blocks].tolist() == blocks[row][:num_blocks]
    others = items[1:]
    for item in others:
        item.sequence.num_computed_tokens += 1
        item.sequence.token_ids.append(7)
    assert builder.build(others).block_table[:, :4].tolist() == blocks[1:]


def test_batches_are_views_of_buffers_allocated_once(builder: BatchBuilder) -> None:
    first = builder.build([scheduled([1], 0, 1, 1, [0])])
    second = builder.build([scheduled([2], 0, 1, 1, [1])])
    assert first.token_ids.data_ptr() == second.token_ids.data_ptr()
    assert first.block_table.data_ptr() == second.block_table.data_ptr()


def test_a_batch_of_the_same_shape_has_the_values_of_its_own_sequences(builder: BatchBuilder) -> None:
    builder.build([scheduled([1, 2], 1, 1, 1, [0]), scheduled([3, 4, 5], 2, 1, 1, [1], adapter_slot=0)])
    batch = builder.build([scheduled([6, 7, 8], 2, 1, 1, [4]), scheduled([9] * 6, 5, 1, 1, [5, 6], adapter_slot=0)])
    assert batch.token_ids.tolist() == [8, 9]
    assert batch.positions.tolist() == [2, 5]
    assert batch.slot_mapping.tolist() == [18, 25]
    assert batch.context_lens.tolist() == [3, 6]
    assert [batch.block_table[0, 0], *batch.block_table[1, :2]] == [4, 5, 6]
    assert batch.segments.adapter_slot.tolist() == [-1, 0]


@pytest.mark.parametrize("other", ["slots", "rows", "sampled rows"])
def test_another_shape_between_two_equal_ones_leaves_no_stale_values(builder: BatchBuilder, other: str) -> None:
    def two(first: ScheduledSequence) -> list[ScheduledSequence]:
        return [first, scheduled([1, 2, 3], 0, 2, 1, [1], adapter_slot=1)]

    between = {
        "slots": scheduled([1, 2], 0, 2, 1, [0], adapter_slot=0),
        "rows": scheduled([1, 2, 3], 0, 3, 1, [0]),
        "sampled rows": scheduled([1, 2], 0, 2, 2, [0]),
    }
    for first in (scheduled([1, 2], 0, 2, 1, [0]), between[other], scheduled([1, 2], 0, 2, 1, [0])):
        batch = builder.build(two(first))
        num_rows = first.num_rows
        assert batch.row_start.tolist() == [0, num_rows]
        assert batch.num_rows.tolist() == [num_rows, 2]
        assert batch.segments.start.tolist() == [0, num_rows, num_rows + 2]
        assert batch.segments.adapter_slot.tolist() == [first.sequence.adapter_slot, 1]
        assert batch.segments.has_adapter
        num_sampled = first.num_sampled_rows
        assert batch.sampled_rows.tolist() == [*range(num_rows - num_sampled, num_rows), num_rows + 1]
        assert batch.sampled_segments.start.tolist() == [0, num_sampled, num_sampled + 1]


def test_a_batch_can_fill_every_buffer_to_its_limit(builder: BatchBuilder) -> None:
    items = [scheduled(list(range(20)), 16, 4, 4, [4, 3, 2, 1, i], adapter_slot=i) for i in range(4)]
    batch = builder.build(items)
    assert batch.sampled_rows.tolist() == list(range(16))
    assert batch.segments.start.tolist() == [0, 4, 8, 12, 16]
    assert batch.block_table[3].tolist() == [4, 3, 2, 1, 3]
