"""Batches for a GPU have the same values as for a CPU, with work lists, and padding if a graph computes them."""

import numpy as np
import pytest
import torch
from loraserve_kernels.attention_work import make_attention_work
from loraserve_kernels.lora_tiles import tiles_of
from loraserve_kernels.step_batch import Segments, StepBatch
from torch import Tensor

from loraserve.engine.request import EngineRequest, SamplingParams
from loraserve.engine.sampling.device_sampler import QueuedTokens
from loraserve.engine.sampling.row import SamplingRow
from loraserve.engine.scheduling.plan import ScheduledSequence
from loraserve.engine.scheduling.sequence import RequestState, Sequence
from loraserve.engine.steps.batch_builder import BatchBuilder
from loraserve.engine.steps.gpu_batch_builder import REBALANCE_STEPS, GpuBatchBuilder
from loraserve.engine.steps.graphs import NO_GRAPHS, GraphSize, GraphSizes
from loraserve.engine.steps.work_lists import WorkLists
from tests.support.host_accelerator import HostAccelerator, HostEvent

MAX_ROWS, MAX_SEQS, MAX_BLOCKS, BLOCK_SIZE = 600, 6, 80, 16
MAX_CONTEXT = MAX_BLOCKS * BLOCK_SIZE
NUM_SPLITS = 8
SIZES = GraphSizes((1, 2, 4, 6), (8, 300, 512), MAX_SEQS)


@pytest.fixture
def builder() -> GpuBatchBuilder:
    work = WorkLists(MAX_ROWS, MAX_SEQS, MAX_CONTEXT, NUM_SPLITS)
    return GpuBatchBuilder(MAX_ROWS, MAX_SEQS, MAX_BLOCKS, BLOCK_SIZE, HostAccelerator(), work, SIZES)


def item(num_computed: int, num_rows: int, num_sampled: int = 1, adapter_slot: int = -1) -> ScheduledSequence:
    token_ids = list(range(num_computed + num_rows))
    request = EngineRequest("r", token_ids, SamplingParams(max_tokens=1))
    sequence = Sequence(RequestState(request, 0.0, b""), 0, token_ids, len(token_ids))
    sequence.num_computed_tokens = num_computed
    sequence.blocks = [3 + 2 * i for i in range(-(-len(token_ids) // BLOCK_SIZE))]
    sequence.adapter_slot = adapter_slot
    return ScheduledSequence(sequence, num_rows, num_sampled)


MIXED = [
    item(40, 1),
    item(0, 9, 0),
    item(700, 1, adapter_slot=0),
    item(3, 130, adapter_slot=0),
    item(0, 420, adapter_slot=4),
]


def entries(work: Tensor) -> list[list[int]]:
    return [entry for entry in work.tolist() if entry[0] >= 0]


def without_lists(batch: StepBatch) -> list[list[int]]:
    of_rows = (batch.token_ids, batch.positions, batch.slot_mapping, batch.sampled_rows)
    of_sequences = (batch.context_lens, batch.row_start, batch.num_rows)
    segments = (batch.segments, batch.sampled_segments)
    of_segments = [tensor for found in segments for tensor in (found.start, found.adapter_slot)]
    return [tensor.tolist() for tensor in (*of_rows, *of_sequences, *of_segments)]


def test_a_gpu_batch_has_the_same_values_as_a_cpu_batch(builder: GpuBatchBuilder) -> None:
    expected = BatchBuilder(MAX_ROWS, MAX_SEQS, MAX_BLOCKS, BLOCK_SIZE).build(MIXED)
    found = builder.build(MIXED)
    assert without_lists(found) == without_lists(expected)
    for row, scheduled in enumerate(MIXED):
        blocks = scheduled.sequence.blocks
        assert found.block_table[row, : len(blocks)].tolist() == blocks


@pytest.mark.parametrize("scheduled", [MIXED, MIXED[:2], MIXED[2:3], MIXED[3:4], MIXED[4:]])
def test_work_lists_match_those_that_the_ops_would_make(
    builder: GpuBatchBuilder, scheduled: list[ScheduledSequence]
) -> None:
    batch = builder.build(scheduled)
    expected = make_attention_work(batch.context_lens, batch.num_rows, NUM_SPLITS)
    assert batch.attention is not None
    assert entries(batch.attention.prefill_tiles) == entries(expected.prefill_tiles)
    for found, made in (
        (batch.attention.decode_splits, expected.decode_splits),
        (batch.attention.append_splits, expected.append_splits),
    ):
        assert {tuple(entry[:2]) for entry in entries(found)} == {tuple(entry[:2]) for entry in entries(made)}
    for segments, num_rows in (
        (batch.segments, len(batch.token_ids)),
        (batch.sampled_segments, len(batch.sampled_rows)),
    ):
        if segments.has_adapter:
            bare = Segments(segments.start, segments.adapter_slot, has_adapter=True)
            assert segments.tiles is not None
            assert entries(segments.tiles) == entries(tiles_of(bare, num_rows))


def test_a_decode_batch_fills_a_graphs_tensors_and_pads_them(builder: GpuBatchBuilder) -> None:
    captured = builder.graph_batch(GraphSize(4, 4), has_adapter=True)
    assert captured.attention is not None
    assert captured.segments.tiles is not None
    assert entries(captured.attention.decode_splits) == entries(captured.segments.tiles) == []
    builder.build(MIXED)  # leaves other values where the padding goes
    batch = builder.build([item(40, 1), item(17, 1, adapter_slot=0), item(18, 1, adapter_slot=2)])
    assert batch.attention is not None
    assert captured.token_ids.tolist() == [40, 17, 18, 0]
    assert captured.positions.tolist() == [40, 17, 18, 0]
    assert captured.slot_mapping.tolist() == [7 * 16 + 8, 5 * 16 + 1, 5 * 16 + 2, -1]
    assert captured.context_lens.tolist() == [41, 18, 19, 0]
    assert captured.row_start.tolist() == captured.sampled_rows.tolist() == [0, 1, 2, 0]
    assert captured.num_rows.tolist() == [1, 1, 1, 0]
    assert captured.segments.tiles.tolist() == [[0, 1, 2] * 2, [2, 2, 3] * 2, [-1, 2, 0] * 2, [-1, 2, 0] * 2]
    assert captured.sampled_segments.tiles is not None
    assert captured.sampled_segments.tiles.tolist() == captured.segments.tiles.tolist()
    assert [entry[0] for entry in entries(captured.attention.decode_splits)] == [0, 1, 2]
    for name in ("decode_splits", "append_splits", "prefill_tiles"):
        assert getattr(captured.attention, name).shape == getattr(batch.attention, name).shape
        assert getattr(captured.attention, name).data_ptr() == getattr(batch.attention, name).data_ptr()


PROMPTS = [
    [item(0, 5, adapter_slot=0)],
    [item(40, 1), item(3, 6, 0, adapter_slot=2)],
    [item(40, 1), item(0, 130), item(17, 1, adapter_slot=3), item(900, 100, adapter_slot=3)],
    [item(0, 300, 0)],
    [item(40, 1, adapter_slot=1), item(0, 9, adapter_slot=2), item(70, 400, 0, adapter_slot=4)],
]
"""Steps for graphs of 8, 8, 300, 300 and 512 rows."""


@pytest.mark.parametrize("scheduled", PROMPTS)
def test_a_batch_with_a_prompt_fills_a_graphs_tensors_and_pads_them(
    builder: GpuBatchBuilder, scheduled: list[ScheduledSequence]
) -> None:
    expected = BatchBuilder(MAX_ROWS, MAX_SEQS, MAX_BLOCKS, BLOCK_SIZE).build(scheduled)
    num_rows, num_seqs, num_sampled = (len(each) for each in (expected.token_ids, scheduled, expected.sampled_rows))
    size = SIZES.of(num_rows, num_seqs, num_sampled)
    assert size is not None
    captured = builder.graph_batch(size, has_adapter=True)
    builder.build(MIXED)  # leaves other values where the padding goes
    batch = builder.build(scheduled)
    assert without_lists(batch) == without_lists(expected)
    num_padded = size.num_rows - num_rows
    assert captured.token_ids.tolist() == [*expected.token_ids.tolist(), *[0] * num_padded]
    assert captured.positions.tolist() == [*expected.positions.tolist(), *[0] * num_padded]
    assert captured.slot_mapping.tolist() == [*expected.slot_mapping.tolist(), *[-1] * num_padded]
    num_absent = size.num_seqs - num_seqs
    for name in ("context_lens", "row_start", "num_rows"):
        assert getattr(captured, name).tolist() == [*getattr(expected, name).tolist(), *[0] * num_absent]
    not_sampled = [0] * (size.num_seqs - num_sampled)
    assert captured.sampled_rows.tolist() == [*expected.sampled_rows.tolist(), *not_sampled]
    for place, running in enumerate(scheduled):
        blocks = running.sequence.blocks
        assert captured.block_table[place, : len(blocks)].tolist() == blocks


@pytest.mark.parametrize("scheduled", PROMPTS)
def test_work_lists_of_a_batch_with_a_prompt_are_where_its_graph_reads_them(
    builder: GpuBatchBuilder, scheduled: list[ScheduledSequence]
) -> None:
    plain = BatchBuilder(MAX_ROWS, MAX_SEQS, MAX_BLOCKS, BLOCK_SIZE).build(scheduled)
    size = SIZES.of(len(plain.token_ids), len(scheduled), len(plain.sampled_rows))
    assert size is not None
    captured = builder.graph_batch(size, has_adapter=True)
    batch = builder.build(scheduled)
    made = make_attention_work(batch.context_lens, batch.num_rows, NUM_SPLITS)
    for name in ("decode_splits", "append_splits", "prefill_tiles"):
        found, expected, read = (getattr(each, name) for each in (batch.attention, made, captured.attention))
        assert (found.data_ptr(), found.shape) == (read.data_ptr(), read.shape)
        assert {tuple(entry[:2]) for entry in entries(found)} == {tuple(entry[:2]) for entry in entries(expected)}
    if not batch.segments.has_adapter:
        return  # its graph reads no adapters
    for segments, of_graph, num_rows in (
        (batch.segments, captured.segments, size.num_rows),
        (batch.sampled_segments, captured.sampled_segments, size.num_seqs),
    ):
        assert segments.tiles is not None
        assert of_graph.tiles is not None
        assert (segments.tiles.data_ptr(), segments.tiles.shape) == (of_graph.tiles.data_ptr(), of_graph.tiles.shape)
        bare = Segments(segments.start, segments.adapter_slot, has_adapter=True)
        for columns in (slice(0, 3), slice(3, 6)):
            assert entries(segments.tiles[:, columns]) == entries(tiles_of(bare, num_rows)[:, columns])


def test_no_stale_tile_remains_when_adjacent_rows_share_an_adapter(builder: GpuBatchBuilder) -> None:
    captured = builder.graph_batch(GraphSize(4, 4), has_adapter=True)
    builder.build([item(1, 1, adapter_slot=slot) for slot in range(4)])
    builder.build([item(1, 1, adapter_slot=5) for _ in range(3)])
    assert captured.segments.tiles is not None
    assert captured.segments.tiles.tolist() == [[5, 0, 3] * 2, *[[-1, 1, 0] * 2] * 3]


def test_contexts_that_grow_are_split_into_more_parts_after_rebalance_steps(builder: GpuBatchBuilder) -> None:
    scheduled = [item(100, 1), item(100, 1)]
    batch = builder.build(scheduled)
    assert batch.attention is not None
    assert len(entries(batch.attention.decode_splits)) == 2
    for longer in scheduled:
        longer.sequence.num_computed_tokens = 1000
        longer.sequence.token_ids = list(range(1001))
        longer.sequence.blocks = list(range(63))
    for _ in range(REBALANCE_STEPS):
        assert builder.build(scheduled) is batch
    assert len(entries(batch.attention.decode_splits)) > 2


def test_a_long_context_that_replaces_another_sequence_is_split_at_once(builder: GpuBatchBuilder) -> None:
    captured = builder.graph_batch(GraphSize(2, 2), has_adapter=False)
    scheduled = [item(100, 1), item(100, 1)]
    for admitted, running in enumerate(scheduled, 1):
        running.sequence.admitted = admitted
    batch = builder.build(scheduled)
    assert batch.attention is not None
    decode_splits = batch.attention.decode_splits
    assert len(entries(decode_splits)) == 2
    scheduled[1] = item(1000, 1)  # all but one token of its prompt had been computed before
    scheduled[1].sequence.admitted = 3
    assert builder.build(scheduled) is batch
    assert captured.attention is not None
    assert len(entries(captured.attention.decode_splits)) > 2, "a captured graph reads the new list"
    assert batch.attention.decode_splits.shape == decode_splits.shape


def test_the_attention_list_is_kept_while_the_same_sequences_run(builder: GpuBatchBuilder) -> None:
    scheduled = [item(100, 1)]
    scheduled[0].sequence.admitted = 1
    attention = builder.build(scheduled).attention
    for _ in range(REBALANCE_STEPS - 2):
        assert builder.build(scheduled).attention is attention


def test_host_arrays_are_written_only_after_the_last_copy_is_done(builder: GpuBatchBuilder) -> None:
    accelerator = builder._buffers._accelerator
    assert isinstance(accelerator, HostAccelerator)
    builder.build(MIXED[:1])
    assert not accelerator.events[-1].is_done
    first = accelerator.events[-1]
    builder.build(MIXED[:1])
    assert first.is_done


def row(position: int, **params: object) -> SamplingRow:
    return SamplingRow(SamplingParams(max_tokens=9, **params), -1, position, [1], [], (7,))  # type: ignore[arg-type]


def test_sampling_parameters_are_copied_with_the_batch(builder: GpuBatchBuilder) -> None:
    builder.build(MIXED[:2], [row(4, temperature=0.7, top_k=5, logprobs=1), row(9, temperature=0.0, logprobs=0)])
    sampling = builder.sampling
    assert sampling is not None
    assert sampling.draws is not None
    assert sampling.scored_rows is not None
    found = [getattr(sampling.draws, name).tolist() for name in ("temperature", "top_k", "seed", "position")]
    assert found == [[0.7, 0.0], [5, 0], [-1, -1], [4, 9]]
    assert sampling.draws.log_min_p.tolist() == [-np.inf] * 2
    assert sampling.scored_rows.tolist() == [0, 1]
    assert not np.shares_memory(sampling.draws.seed.numpy(), builder._buffers._host.numpy())


def test_a_greedy_batch_has_no_draws_and_a_batch_with_unknown_rows_no_sampling(builder: GpuBatchBuilder) -> None:
    builder.build(MIXED[:2], [row(4, temperature=1.0), row(9, temperature=1.0)])
    builder.build(MIXED[:1], [row(4, temperature=0.0)])
    assert builder.sampling is not None
    assert builder.sampling.draws is None
    assert builder.sampling.scored_rows is None
    builder.build(MIXED[:1])
    assert builder.sampling is None


DECODES = [(40, -1), (16, 0), (18, 2)]
"""(computed tokens, adapter slot)."""


def test_a_batch_of_tokens_that_only_the_device_knows_equals_one_of_known_tokens(builder: GpuBatchBuilder) -> None:
    captured = builder.graph_batch(GraphSize(4, 4), has_adapter=True)
    known = [item(num_computed, 1, adapter_slot=slot) for num_computed, slot in DECODES]
    expected = BatchBuilder(MAX_ROWS, MAX_SEQS, MAX_BLOCKS, BLOCK_SIZE).build(known)
    unknown = [item(num_computed, 1, adapter_slot=slot) for num_computed, slot in DECODES]
    for scheduled in unknown:
        scheduled.sequence.token_ids.pop()
    copied = HostEvent()
    tokens = QueuedTokens(torch.tensor([18, 40, 99, 16]), torch.zeros(4, dtype=torch.int64), copied)
    builder.build(MIXED)  # leaves other values everywhere
    batch = builder.build_ahead(unknown, tokens, [1, 3, 0])
    assert without_lists(batch) == without_lists(expected)
    for row, scheduled in enumerate(unknown):
        blocks = scheduled.sequence.blocks
        assert batch.block_table[row, : len(blocks)].tolist() == blocks
    assert captured.token_ids.tolist() == [40, 16, 18, 0]
    assert builder.build_ahead(unknown, tokens, [1, 3, 0]) is batch
    assert not copied.is_done


def test_a_batch_built_ahead_keeps_known_tokens_beside_unknown_ones(builder: GpuBatchBuilder) -> None:
    expected = BatchBuilder(MAX_ROWS, MAX_SEQS, MAX_BLOCKS, BLOCK_SIZE).build(MIXED)
    partly_known = [item(each.sequence.num_computed_tokens, each.num_rows, each.num_sampled_rows) for each in MIXED]
    for scheduled, like in zip(partly_known, MIXED, strict=True):
        scheduled.sequence.adapter_slot = like.sequence.adapter_slot
    for place in (0, 2):
        partly_known[place].sequence.token_ids.pop()
    tokens = QueuedTokens(torch.tensor([700, -1, 40]), torch.zeros(3, dtype=torch.int64), HostEvent())
    batch = builder.build_ahead(partly_known, tokens, [2, None, 0, None, None])
    assert without_lists(batch) == without_lists(expected)


def test_a_non_finite_row_continues_with_a_valid_token(builder: GpuBatchBuilder) -> None:
    scheduled = [item(17, 1)]
    scheduled[0].sequence.token_ids.pop()
    tokens = QueuedTokens(torch.tensor([-1]), torch.zeros(1, dtype=torch.int64), HostEvent())
    assert builder.build_ahead(scheduled, tokens, [0]).token_ids.tolist() == [0]


def decodes(num_steps: int) -> list[ScheduledSequence]:
    """`DECODES`, `num_steps` steps later, with the same sequences; only the device knows their last tokens."""
    scheduled = [item(num_computed + num_steps, 1, adapter_slot=slot) for num_computed, slot in DECODES]
    for admitted, running in enumerate(scheduled, 1):
        running.sequence.admitted = admitted
        running.sequence.token_ids.pop()
    return scheduled


def test_a_batch_reused_ahead_for_the_same_sequences_equals_a_fresh_one(builder: GpuBatchBuilder) -> None:
    """Across block boundaries, and then for a batch of other sequences."""
    captured = builder.graph_batch(GraphSize(4, 4), has_adapter=True)
    tokens = QueuedTokens(torch.tensor([7, 8, 9]), torch.zeros(3, dtype=torch.int64), HostEvent())
    rows = [row(0)] * 3
    batch = builder.build_ahead(decodes(0), tokens, [0, 1, 2])
    for num_steps in range(1, 40):
        scheduled = decodes(num_steps)
        fresh = GpuBatchBuilder(MAX_ROWS, MAX_SEQS, MAX_BLOCKS, BLOCK_SIZE, HostAccelerator(), None, NO_GRAPHS)
        expected = without_lists(fresh.build_ahead(scheduled, tokens, [0, 1, 2]))
        assert builder.build_again_ahead(scheduled, tokens, rows) is batch
        assert without_lists(batch) == expected
        assert captured.token_ids.tolist() == [7, 8, 9, 0]
        assert captured.slot_mapping[3] == -1
        for place, running in enumerate(scheduled):
            blocks = running.sequence.blocks
            assert batch.block_table[place, : len(blocks)].tolist() == blocks
    others = decodes(39)[1:]
    expected = without_lists(fresh.build_ahead(others, tokens, [1, 2]))
    assert without_lists(builder.build_ahead(others, tokens, [1, 2])) == expected


def test_a_batch_reused_ahead_draws_its_tokens_by_their_new_positions(builder: GpuBatchBuilder) -> None:
    tokens = QueuedTokens(torch.tensor([7]), torch.zeros(1, dtype=torch.int64), HostEvent())
    builder.build_ahead(decodes(0)[:1], tokens, [0], [row(41, temperature=1.0)])
    builder.build_again_ahead(decodes(1)[:1], tokens, [row(42, temperature=1.0)])
    assert builder.sampling is not None
    assert builder.sampling.draws is not None
    assert builder.sampling.draws.position.tolist() == [42]


def test_building_ahead_writes_host_arrays_only_after_the_last_copy_is_done(builder: GpuBatchBuilder) -> None:
    accelerator = builder._buffers._accelerator
    assert isinstance(accelerator, HostAccelerator)
    scheduled = [item(17, 1)]
    tokens = QueuedTokens(torch.tensor([5]), torch.zeros(1, dtype=torch.int64), HostEvent())
    builder.build(scheduled)
    copied = accelerator.events[-1]
    builder.build_ahead(scheduled, tokens, [0])
    assert copied.is_done
    assert not accelerator.events[-1].is_done


def test_without_lists_and_graphs_a_batch_is_only_copied() -> None:
    builder = GpuBatchBuilder(MAX_ROWS, MAX_SEQS, MAX_BLOCKS, BLOCK_SIZE, HostAccelerator(), None, NO_GRAPHS)
    batch = builder.build([item(17, 1, adapter_slot=1)])
    assert batch.token_ids.tolist() == [17]
    assert batch.attention is None
    assert batch.segments.tiles is None
    assert not np.shares_memory(batch.token_ids.numpy(), builder._token_ids.array)
