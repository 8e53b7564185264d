from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loraserve_kernels.lora_tiles import (
    DECODE_MAX_ROWS,
    EXPAND_MAX_ROWS,
    EXPAND_TILE_ROWS,
    LORA_TILE_ROWS,
    PREFILL_TILE_ROWS,
    check_tiles,
    expand_tile_rows,
    fill_tiles,
    tile_capacity,
    tile_rows,
    tiles_of,
)
from loraserve_kernels.step_batch import Segments

BASE = -1


def make_tiles(rows: list[int], slots: list[int], *, num_rows: int | None = None, num_tiles: int | None = None):
    num_rows = sum(rows) if num_rows is None else num_rows
    tiles = np.full((tile_capacity(num_rows, len(rows)) if num_tiles is None else num_tiles, 6), 99, np.int32)
    fill_tiles(tiles, np.cumsum([0, *rows]).astype(np.int32), np.array(slots, np.int32), num_rows)
    return tiles


@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 2, 3, 4, 5, 16, 63, 64, 65, 200]), st.integers(-1, 3)), max_size=12),
    st.integers(0, 40),
)
def test_tiles_contain_every_adapter_row_exactly_once_and_no_others(segments, num_padding_rows):
    rows, slots = [n for n, _ in segments], [slot for _, slot in segments]
    num_rows = sum(rows) + num_padding_rows
    tiles = make_tiles(rows, slots, num_rows=num_rows)
    expected = [slot for n, slot in segments for _ in range(n)] + [BASE] * num_padding_rows
    for each, most in ((tiles[:, :3], tile_rows(num_rows)), (tiles[:, 3:], expand_tile_rows(num_rows))):
        found = [BASE] * num_rows
        num_used = int((each[:, 0] >= 0).sum())
        for slot, first, end in each[:num_used].tolist():
            assert 0 < end - first <= most
            assert found[first:end] == [BASE] * (end - first)
            found[first:end] = [slot] * (end - first)
        assert found == expected
        assert (each[num_used:] == (BASE, num_used, 0)).all()


def test_the_capacity_tightly_fits_the_worst_segments():
    for num_rows in (1, 4, 5, 17, 40, EXPAND_MAX_ROWS + 1, DECODE_MAX_ROWS + 1):
        for max_segments in (1, 2, 7, num_rows):
            lone_rows = min(max_segments, num_rows) - 1
            rows = [1] * lone_rows + [num_rows - lone_rows]
            used = int((make_tiles(rows, list(range(len(rows))))[:, 3] >= 0).sum())
            capacity = tile_capacity(num_rows, max_segments)
            assert used <= capacity <= used + (num_rows > expand_tile_rows(num_rows))


def test_larger_batches_have_tiles_of_more_rows():
    assert (tile_rows(EXPAND_MAX_ROWS), expand_tile_rows(EXPAND_MAX_ROWS)) == (LORA_TILE_ROWS, EXPAND_TILE_ROWS)
    for num_rows in (EXPAND_MAX_ROWS + 1, DECODE_MAX_ROWS):
        assert {each(num_rows) for each in (tile_rows, expand_tile_rows)} == {LORA_TILE_ROWS}
    assert {each(DECODE_MAX_ROWS + 1) for each in (tile_rows, expand_tile_rows)} == {PREFILL_TILE_ROWS}
    assert make_tiles([600], [5]).tolist()[:2] == [[5, 0, 64] * 2, [5, 64, 128] * 2]
    assert make_tiles([17], [5])[:, :3].tolist() == [[5, 0, 16], [5, 16, 17], *[[BASE, 2, 0]] * 3]
    assert make_tiles([10], [5])[:, 3:].tolist() == [[5, 0, 4], [5, 4, 8], [5, 8, 10]]


def test_refuses_too_few_tiles_and_too_few_rows():
    with pytest.raises(ValueError, match="number of tiles is 2, expected at least 3"):
        make_tiles([1, 1, 1], [0, 1, 2], num_tiles=2)
    with pytest.raises(ValueError, match="num_rows is 2"):
        make_tiles([3], [0], num_rows=2)


def test_tiles_are_built_only_if_the_runner_made_none():
    start, slots = torch.tensor([0, 2, 8], dtype=torch.int32), torch.tensor([BASE, 4], dtype=torch.int32)
    built = tiles_of(Segments(start, slots, has_adapter=True), 8)
    assert built.tolist() == [[4, 2, 8, 4, 2, 6], [BASE, 1, 0, 4, 6, 8], [BASE, 1, 0, BASE, 2, 0]]
    made = torch.zeros((1, 6), dtype=torch.int32)
    assert tiles_of(Segments(start, slots, has_adapter=True, tiles=made), 20) is made


def test_building_tiles_is_refused_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
        tiles_of(Segments(on_gpu, on_gpu, has_adapter=True), 4)


@pytest.mark.parametrize(
    ("tiles", "message"),
    [
        (torch.zeros((4, 3), dtype=torch.int32), r"num_tiles, 6"),
        (torch.zeros((4, 6), dtype=torch.int64), "dense int32"),
        (torch.zeros((6, 4), dtype=torch.int32).T, "dense int32"),
        (torch.zeros((4, 6), dtype=torch.int32, device="meta"), "device"),
    ],
)
def test_refuses_tiles_the_kernels_cannot_read(tiles, message):
    with pytest.raises(ValueError, match=message):
        check_tiles(tiles, torch.zeros(1, 1))
