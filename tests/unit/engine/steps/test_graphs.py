from collections.abc import Callable

import pytest
import torch
from loraserve_kernels.lora_tiles import DECODE_MAX_ROWS
from loraserve_kernels.step_batch import StepBatch
from torch import Tensor

from loraserve.engine.adapters.arrival import Arrival, CopyParts, StepArrivals
from loraserve.engine.scheduling.plan import ScheduledSequence
from loraserve.engine.steps.gpu_batch_builder import GpuBatchBuilder
from loraserve.engine.steps.graphs import MAX_GRAPH_ROWS, CaptureError, GraphSize, GraphSizes, StepGraphs
from tests.support.host_accelerator import HostAccelerator
from tests.unit.engine.steps.test_gpu_batch_builder import item

DECODE, PROMPTS = (1, 2, 4), (8, 12)


@pytest.mark.parametrize("limit", [1, 3, 8, 128, 200, 512, 4096])
def test_decode_sizes_reach_the_limit_and_less_than_half_of_the_rows_are_padding(limit: int) -> None:
    sizes, most = GraphSizes.up_to(limit, limit), min(limit, MAX_GRAPH_ROWS)
    for num_rows in range(1, most + 1):
        size = sizes.of(num_rows, num_rows, num_rows)
        assert size is not None
        assert size.is_decode
        assert num_rows <= size.num_rows < max(2 * num_rows, 2), "more than half is padding"
    assert sizes.of(most + 1, most + 1, most + 1) is None


@pytest.mark.parametrize("limit", [2, 3, 16, 100, 512, 4096])
def test_sizes_with_prompts_reach_the_limit_and_have_room_for_all_sequences(limit: int) -> None:
    max_num_seqs = 64
    sizes, most = GraphSizes.up_to(limit, max_num_seqs), min(limit, MAX_GRAPH_ROWS)
    for num_rows in range(2, most + 1):
        num_seqs = min(num_rows - 1, max_num_seqs)
        size = sizes.of(num_rows, num_seqs, num_seqs)
        assert size is not None
        assert not size.is_decode
        assert num_rows <= size.num_rows <= most
        assert size.num_rows < max(2 * num_rows, 33), "more than half is padding"
    assert sizes.of(most + 1, 1, 1) is None


def test_no_graph_fits_a_step_that_samples_more_rows_than_max_num_seqs() -> None:
    sizes = GraphSizes.up_to(64, 4)
    assert sizes.of(20, 4, 4) == GraphSize(32, 4)
    assert sizes.of(20, 1, 20) is None, "log-probabilities of a prompt"


def test_no_graph_has_room_for_more_sequences_than_the_first() -> None:
    for max_num_rows, max_num_seqs in ((2048, 256), (64, 512), (600, 600), (3, 3), (2, 1), (1, 1)):
        first, *others = GraphSizes.up_to(max_num_rows, max_num_seqs).all()
        assert all(size.num_seqs <= first.num_seqs for size in others)


def test_graphs_have_no_more_rows_than_small_lora_tiles_are_used_for() -> None:
    assert MAX_GRAPH_ROWS <= DECODE_MAX_ROWS


class Graphs:
    """Captured graphs of a model that returns each row's token as its logit."""

    def __init__(self, has_adapters: bool) -> None:
        self.accelerator = HostAccelerator()
        sizes = GraphSizes(DECODE, PROMPTS, 4)
        self.builder = GpuBatchBuilder(16, 4, 4, 16, self.accelerator, None, sizes)
        self.graphs = StepGraphs(self.accelerator, sizes)
        self.computed: list[tuple[int, bool]] = []
        self.num_waited_for: list[int] = []
        """Before each computation: number of events waited for."""
        self.progress: list[tuple[int, int]] = []
        self.graphs.capture(
            self.forward, self.builder.graph_batch, has_adapters, lambda *done: self.progress.append(done)
        )

    def forward(self, batch: StepBatch) -> Tensor:
        self.computed.append((len(batch.token_ids), batch.segments.has_adapter))
        self.num_waited_for.append(len(self.accelerator.waited_for))
        return batch.token_ids[batch.sampled_rows][:, None].float()


def test_every_size_is_captured_largest_first_with_and_without_adapters() -> None:
    graphs = Graphs(has_adapters=True)
    assert graphs.accelerator.num_recordings == 10
    assert graphs.computed[0] == (4, False)
    sizes = (*DECODE, *PROMPTS)
    assert set(graphs.computed) == {(size, has_adapter) for size in sizes for has_adapter in (False, True)}
    assert graphs.progress == [(done, 10) for done in range(1, 11)]


def test_without_adapters_half_as_many_graphs_are_captured() -> None:
    assert Graphs(has_adapters=False).accelerator.num_recordings == 5


class FailingCapture(HostAccelerator):
    """A capture that fails like torch's: with an error of its own after the call's error."""

    def capture(self, call: Callable[[], None]) -> Callable[[], None]:
        try:
            call()
        finally:
            raise torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture\nCompile")


@pytest.mark.parametrize(
    ("cause", "raised", "message"),
    [
        (
            RuntimeError("operation not permitted when stream is capturing\nadvice"),
            CaptureError,
            "not permitted .*ing$",
        ),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError, "CUDA out of memory"),
    ],
)
def test_a_failed_capture_reports_the_first_error(cause: Exception, raised: type[Exception], message: str) -> None:
    sizes = GraphSizes(DECODE, PROMPTS, 4)
    builder = GpuBatchBuilder(16, 4, 4, 16, HostAccelerator(), None, sizes)
    num_calls = 0

    def forward(batch: StepBatch) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 1:
            raise cause
        return batch.token_ids[:, None].float()

    graphs = StepGraphs(FailingCapture(), sizes)
    with pytest.raises(raised, match=message):
        graphs.capture(forward, builder.graph_batch, False, lambda *_: None)


@pytest.mark.parametrize("adapter_slot", [-1, 2])
def test_a_decode_step_replays_the_smallest_graph_that_holds_it(adapter_slot: int) -> None:
    graphs = Graphs(has_adapters=True)
    scheduled = [item(3, 1), item(5, 1), item(7, 1, adapter_slot=adapter_slot)]
    logits = graphs.graphs.try_replay(graphs.builder.build(scheduled))
    assert logits is not None
    assert logits.tolist() == [[3], [5], [7]]
    assert graphs.computed[-1] == (4, adapter_slot >= 0)
    assert graphs.accelerator.num_replays == 1


@pytest.mark.parametrize(
    ("scheduled", "expected"),
    [
        ([item(0, 2)], [1]),
        ([item(3, 1), item(0, 2, 2)], [3, 0, 1]),
        ([item(0, 1, 0)], []),
        ([item(5, 6, 0), item(7, 1), item(9, 2, adapter_slot=1)], [7, 10]),
    ],
)
def test_a_step_with_a_prompt_replays_the_smallest_graph_that_holds_it(
    scheduled: list[ScheduledSequence], expected: list[int]
) -> None:
    """Whichever of its rows are sampled."""
    graphs = Graphs(has_adapters=True)
    logits = graphs.graphs.try_replay(graphs.builder.build(scheduled))
    assert logits is not None
    assert logits.flatten().tolist() == expected
    num_rows = sum(each.num_rows for each in scheduled)
    assert graphs.computed[-1] == (8 if num_rows <= 8 else 12, scheduled[-1].sequence.adapter_slot >= 0)
    assert graphs.accelerator.num_replays == 1


@pytest.mark.parametrize("scheduled", [[item(0, 13)], [item(0, 8, 8)]])
def test_a_step_with_more_rows_or_sampled_rows_than_any_graph_is_not_replayed(
    scheduled: list[ScheduledSequence],
) -> None:
    graphs = Graphs(has_adapters=True)
    assert graphs.graphs.try_replay(graphs.builder.build(scheduled)) is None
    assert graphs.accelerator.num_replays == 0


def test_a_step_with_pooled_rows_is_not_replayed() -> None:
    """A graph keeps only its logits. Such a step is not padded for a graph either."""
    graphs = Graphs(has_adapters=True)
    to_pool = item(0, 2, 0)
    to_pool.num_pooled_rows = 1
    batch = graphs.builder.build([item(3, 1), to_pool])
    assert batch.pooled_rows is not None
    assert batch.pooled_rows.tolist() == [2]
    assert batch.sampled_rows.tolist() == [0]
    assert graphs.graphs.try_replay(batch) is None
    assert graphs.builder._graph is None
    again = graphs.builder.build([item(3, 1), item(0, 2, 0)])
    assert again.pooled_rows is None
    assert graphs.graphs.try_replay(again) is not None


def test_a_step_with_more_sequences_than_the_largest_graph_is_not_replayed() -> None:
    graphs = Graphs(has_adapters=False)
    builder = GpuBatchBuilder(16, 8, 4, 16, HostAccelerator(), None, GraphSizes(DECODE, PROMPTS, 4))
    assert graphs.graphs.try_replay(builder.build([item(1, 1) for _ in range(5)])) is None


def test_a_replay_begins_once_its_adapters_are_fully_copied() -> None:
    graphs = Graphs(has_adapters=True)
    accelerator = graphs.accelerator
    copied = [accelerator.record() for _ in range(2)]
    arrivals = StepArrivals([Arrival(accelerator, CopyParts((1, 2), (0, 1)), copied)])
    batch = graphs.builder.build([item(3, 1, adapter_slot=2)])
    assert graphs.graphs.try_replay(batch, arrivals) is not None
    assert accelerator.waited_for == [copied[1]]
    assert graphs.num_waited_for[-1] == 1


def test_try_replay_does_not_wait_for_adapters_if_it_replays_nothing() -> None:
    graphs = Graphs(has_adapters=True)
    arrivals = StepArrivals([Arrival(graphs.accelerator, CopyParts((1,), (0,)), [graphs.accelerator.record()])])
    assert graphs.graphs.try_replay(graphs.builder.build([item(0, 13, adapter_slot=2)]), arrivals) is None
    assert graphs.accelerator.waited_for == []
