from collections.abc import Callable

import pytest
import torch
from loraserve_kernels.lora_tiles import DECODE_MAX_ROWS
from loraserve_kernels.step_batch import StepBatch
from torch import Tensor

from loraserve.engine.adapter_arrival import Arrival, CopyParts, StepArrivals
from loraserve.engine.decode_graphs import MAX_GRAPH_ROWS, CaptureError, DecodeGraphs, graph_size, graph_sizes
from loraserve.engine.gpu_batch_builder import GpuBatchBuilder
from tests.support.host_accelerator import HostAccelerator
from tests.unit.engine.test_gpu_batch_builder import item

SIZES = (1, 2, 4)


@pytest.mark.parametrize("limit", [1, 3, 8, 128, 200, 512, 4096])
def test_sizes_rise_to_the_limit_and_pad_a_few_rows_at_most(limit: int) -> None:
    sizes = graph_sizes(limit)
    assert sizes[-1] == min(limit, MAX_GRAPH_ROWS)
    for num_rows in range(1, sizes[-1] + 1):
        size = graph_size(sizes, num_rows)
        assert size is not None
        assert num_rows <= size < max(2 * num_rows, 2), "more than half is padding"
    assert graph_size(sizes, sizes[-1] + 1) is None


def test_a_graphs_adapters_have_low_tiles_whose_programs_are_bounded() -> None:
    assert MAX_GRAPH_ROWS <= DECODE_MAX_ROWS


class Graphs:
    """Whose model gives each row's token as its logit."""

    def __init__(self, has_adapters: bool) -> None:
        self.accelerator = HostAccelerator()
        self.builder = GpuBatchBuilder(16, 4, 4, 16, self.accelerator, None, SIZES)
        self.graphs = DecodeGraphs(self.accelerator, SIZES)
        self.computed: list[tuple[int, bool]] = []
        self.num_waited_for: list[int] = []
        """Before each computation: events that were waited for."""
        self.progress: list[tuple[int, int]] = []
        self.graphs.capture(
            self.forward, self.builder.graph_batch, has_adapters, lambda *done: self.progress.append(done)
        )

    def forward(self, batch: StepBatch) -> Tensor:
        self.computed.append((len(batch.token_ids), batch.segments.has_adapter))
        self.num_waited_for.append(len(self.accelerator.waited_for))
        return batch.token_ids[:, None].float()


def test_every_size_is_captured_largest_first_with_and_without_adapters() -> None:
    graphs = Graphs(has_adapters=True)
    assert graphs.accelerator.num_recordings == 6
    assert graphs.computed[0] == (4, False)
    assert set(graphs.computed) == {(size, has_adapter) for size in SIZES for has_adapter in (False, True)}
    assert graphs.progress == [(done, 6) for done in range(1, 7)]


def test_without_adapters_there_are_half_as_many() -> None:
    assert Graphs(has_adapters=False).accelerator.num_recordings == 3


class FailingCapture(HostAccelerator):
    """A capture that ends as torch's do: with an error of its own behind that of the call."""

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
def test_a_failed_capture_tells_what_failed_first(cause: Exception, raised: type[Exception], message: str) -> None:
    builder = GpuBatchBuilder(16, 4, 4, 16, HostAccelerator(), None, SIZES)
    num_calls = 0

    def forward(batch: StepBatch) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 1:
            raise cause
        return batch.token_ids[:, None].float()

    graphs = DecodeGraphs(FailingCapture(), SIZES)
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


@pytest.mark.parametrize("scheduled", [[item(0, 2)], [item(3, 1), item(0, 2, 2)], [item(0, 1, 0)]])
def test_a_step_with_several_rows_of_a_sequence_or_none_to_sample_is_not_replayed(scheduled: list) -> None:
    graphs = Graphs(has_adapters=True)
    assert graphs.graphs.try_replay(graphs.builder.build(scheduled)) is None
    assert graphs.accelerator.num_replays == 0


def test_more_sequences_than_the_largest_graph_are_not_replayed() -> None:
    graphs = Graphs(has_adapters=False)
    builder = GpuBatchBuilder(16, 8, 4, 16, HostAccelerator(), None, SIZES)
    assert graphs.graphs.try_replay(builder.build([item(1, 1) for _ in range(5)])) is None


def test_a_replay_begins_when_all_of_its_adapters_are_there() -> None:
    graphs = Graphs(has_adapters=True)
    accelerator = graphs.accelerator
    copied = [accelerator.record() for _ in range(2)]
    arrivals = StepArrivals([Arrival(accelerator, CopyParts((1, 2), (0, 1)), copied)])
    batch = graphs.builder.build([item(3, 1, adapter_slot=2)])
    assert graphs.graphs.try_replay(batch, arrivals) is not None
    assert accelerator.waited_for == [copied[1]]
    assert graphs.num_waited_for[-1] == 1


def test_a_step_that_is_not_replayed_waits_for_nothing_here() -> None:
    graphs = Graphs(has_adapters=True)
    arrivals = StepArrivals([Arrival(graphs.accelerator, CopyParts((1,), (0,)), [graphs.accelerator.record()])])
    assert graphs.graphs.try_replay(graphs.builder.build([item(0, 2, adapter_slot=2)]), arrivals) is None
    assert graphs.accelerator.waited_for == []
