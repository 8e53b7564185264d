"""`lora_add` launched again with other values in the same tensors, as a CUDA graph does at each step."""

import dataclasses

import numpy as np
import pytest
import torch
from loraserve_kernels.lora_add import LoraInputs, lora_add_reference, make_lora_inputs
from loraserve_kernels.lora_tiles import fill_tiles, tile_capacity
from torch import Tensor

BASE = -1
NUM_ROWS = 24
LARGE_GRAPH_ROWS = 320
RANKS = [(3, 0), (64, 33), (1, 512), (16, 16), (130, 2)]


@pytest.fixture
def num_rows() -> int:
    return NUM_ROWS


@pytest.fixture
def step(triton_device: str, num_rows: int) -> LoraInputs:
    """Inputs of the largest batch: a table of five adapters, and a work list allocated as a runner does."""
    inputs = make_lora_inputs([num_rows], [0], RANKS, 300, (70, 40), device=triton_device)
    tiles = torch.empty((tile_capacity(num_rows, num_rows), 6), dtype=torch.int32, device=triton_device)
    inputs.segments = dataclasses.replace(inputs.segments, tiles=tiles)
    return inputs


def fill(step: LoraInputs, rows: list[int], slots: list[int]) -> Tensor:
    """Writes another batch into the same tensors; returns the expected y in float64."""
    tiles = np.empty(tuple(step.segments.tiles.shape), np.int32)
    start = np.cumsum([0, *rows]).astype(np.int32)
    fill_tiles(tiles, start, np.array(slots, np.int32), step.x.shape[0])
    step.segments.tiles.copy_(torch.from_numpy(tiles))
    generator = torch.Generator().manual_seed(sum(rows))
    for tensor in (step.x, step.y):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    expected = step.y.double()
    segments = dataclasses.replace(
        step.segments, start=torch.from_numpy(start), adapter_slot=torch.tensor(slots, dtype=torch.int32)
    )
    lora_add_reference(expected, step.x, step.group, step.table, segments)
    return expected


@pytest.fixture
def replay(step: LoraInputs, num_rows: int, replayed):
    """A call that repeats a launch recorded with the smallest batch, and returns y."""
    from loraserve_kernels.triton_backend import TritonBackend

    fill(step, [num_rows - 1, 1], [BASE, 0])
    call = replayed(lambda: TritonBackend().lora_add(step.y, step.x, step.group, step.table, step.segments))

    def again() -> Tensor:
        call()
        return step.y

    return again


def test_a_replay_serves_more_adapters_of_larger_ranks_than_the_first_launch(step, replay, assert_close):
    for rows, slots in (
        ([1, 20, 3], [BASE, 0, 3]),
        ([3, 1, 15, 1, 2, 2], [BASE, 0, 1, 2, 3, 4]),
        ([24], [4]),
        ([1] * 24, [0, 1, 2, 3, 4] * 4 + [0, 1, 2, 3]),
    ):
        expected = fill(step, rows, slots)
        assert_close(replay(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [LARGE_GRAPH_ROWS])
def test_a_large_graph_serves_rows_of_one_adapter_and_rows_of_many(step, replay, assert_close):
    for rows, slots in (
        ([LARGE_GRAPH_ROWS], [3]),
        ([1] * LARGE_GRAPH_ROWS, [0, 3] * (LARGE_GRAPH_ROWS // 2)),
        ([270, 40, 7], [BASE, 0, 3]),
    ):
        expected = fill(step, rows, slots)
        num_filled = sum(rows)
        assert_close(replay()[:num_filled], expected[:num_filled])


def test_a_replay_serves_fewer_rows_than_the_launch_was_made_for(step, replay, assert_close):
    """Padding rows are not changed: they stay NaN."""
    expected = fill(step, [2, 5], [BASE, 1])
    step.y[7:] = step.x[7:] = float("nan")
    found = replay()
    assert_close(found[:7], expected[:7])
    assert found[7:].isnan().all()


def test_a_replay_with_only_base_rows_changes_nothing(step, replay):
    fill(step, [24], [BASE])
    before = step.y.clone()
    assert torch.equal(replay(), before)


def test_a_replay_finds_adapters_that_moved_in_the_arena(step, replay, assert_close):
    expected = fill(step, [2, 10, 12], [0, 1, 3])
    table, gap = step.table, 64
    table.arena.copy_(torch.cat([torch.full((gap,), float("nan")), table.arena.cpu()[:-gap]]))
    table.offset_a += gap
    table.offset_b += gap
    assert_close(replay(), expected)
