import numpy as np
import pytest
from gpu.lora import Workload, workloads
from loraserve_kernels.lora_tiles import DECODE_MAX_ROWS, fill_tiles


@pytest.mark.parametrize(
    ("num_rows", "num_adapters", "num_tiles"),
    [(64, 1, 64), (512, 8, 512), (2048, 4, 4 + 31), (8192, 8, 8 + 127)],
)
def test_work_lists_have_the_length_of_the_engines_lists(num_rows: int, num_adapters: int, num_tiles: int) -> None:
    """A graph has one tile per row; a larger batch, which runs eagerly, has the most tiles its segments can need."""
    assert Workload("qkv", num_rows, num_adapters, (16,)).num_tiles == num_tiles


def test_every_workload_fits_its_work_list() -> None:
    assert {each.num_rows > DECODE_MAX_ROWS for each in workloads()} == {False, True}
    for each in workloads():
        start = np.cumsum([0, *each.segment_rows]).astype(np.int32)
        tiles = np.empty((each.num_tiles, 6), np.int32)
        fill_tiles(tiles, start, np.arange(each.num_adapters, dtype=np.int32), each.num_rows)
        assert tiles[:, 2].max() == tiles[:, 5].max() == each.num_rows
