import dataclasses
import math
from dataclasses import dataclass

import pytest
import torch
from loraserve_kernels.adapter_table import MAX_LORA_RANK, AdapterTable
from loraserve_kernels.lora_add import (
    POPULARITIES,
    LoraInputs,
    magnitude_of,
    make_lora_inputs,
    make_popularity,
    matrix,
)
from loraserve_kernels.lora_tiles import tiles_of
from torch import Tensor

BASE = -1


@dataclass(slots=True)
class ExpandInputs:
    lora: LoraInputs
    hidden: Tensor
    """NaN wherever the op must not read."""
    tiles: Tensor
    expected: Tensor
    """float64: y after the op."""

    def run(self) -> Tensor:
        from loraserve_kernels.triton_ops.lora_expand import lora_expand

        lora_expand(self.lora.y, self.hidden, self.lora.group, self.lora.table, self.tiles)
        return self.lora.y


def with_biases(table: AdapterTable, slot: int, member: int, size: int) -> AdapterTable:
    """The table with a random bias for one member of one adapter."""
    offset_bias = torch.full_like(table.offset_b, -1) if not table.offset_bias.numel() else table.offset_bias.clone()
    offset_bias[slot, member] = table.arena.numel()
    bias = torch.randn(size, generator=torch.Generator().manual_seed(9)).to(table.arena)
    return dataclasses.replace(table, arena=torch.cat([table.arena, bias]), offset_bias=offset_bias, num_biased=1)


def make_inputs(lora: LoraInputs, splits: int = 2) -> ExpandInputs:
    table, group = lora.table, lora.group
    num_rows, num_members = lora.y.shape[0], len(group.out_features)
    generator = torch.Generator().manual_seed(5)
    shape = (splits, num_rows, num_members * MAX_LORA_RANK)
    values = (torch.randn(shape, generator=generator) * splits**-0.5).to(lora.y.device)
    hidden = torch.full_like(values, float("nan"))
    expected = lora.y.double()
    starts = lora.segments.start.tolist()
    for slot, first, end in zip(lora.segments.adapter_slot.tolist(), starts[:-1], starts[1:], strict=True):
        if slot == BASE:
            continue
        outputs = expected[first:end].split(list(group.out_features), dim=1)
        for i, out in enumerate(outputs):
            member, lora_rank = group.member_start + i, int(table.lora_rank[slot, group.member_start + i])
            if not lora_rank:
                continue
            columns = slice(i * MAX_LORA_RANK, i * MAX_LORA_RANK + lora_rank)
            hidden[:, first:end, columns] = values[:, first:end, columns]
            b = matrix(table, int(table.offset_b[slot, member]), lora_rank, out.shape[1]).double()
            product = values[:, first:end, columns].double().sum(0) @ b
            bias_start = int(table.offset_bias[slot, member]) if table.offset_bias.numel() else -1
            if bias_start >= 0:
                product += table.arena[bias_start : bias_start + out.shape[1]].double()
            out += float(table.scaling[slot, member]) * product
            magnitude = magnitude_of(table, slot, member, out.shape[1])
            if magnitude is not None:
                out.mul_(magnitude[0].double()).add_(magnitude[1].double())
    return ExpandInputs(lora, hidden, tiles_of(lora.segments, num_rows), expected)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(
    ("rows", "slots", "ranks", "out_features"),
    [
        pytest.param([1], [0], [(1,)], (1,), id="smallest"),
        pytest.param([3, 2], [0, 1], [(1, 1, 1), (1, 0, 1)], (19, 5, 33), id="rank-1"),
        pytest.param([2, 3], [0, 1], [(512, 512), (3, 512)], (257, 20), id="rank-512"),
        pytest.param([2, 1, 37, 4], [BASE, 0, 1, 2], [(33, 16), (16, 64), (8, 33)], (300, 70), id="mixed-ranks"),
        pytest.param([4, 0, 3, 0], [BASE, 0, 1, 2], [(4,), (5,), (6,)], (48,), id="empty-segments"),
        pytest.param([3, 3], [0, 1], [(0, 9, 0), (0, 0, 0)], (24, 40, 8), id="absent-members"),
        pytest.param([100, 1, 40], [0, BASE, 1], [(20, 7, 33), (70, 0, 1)], (150, 3, 9), id="more-rows"),
        pytest.param([515, 1, 5], [0, BASE, 1], [(20, 7, 33), (70, 0, 1)], (150, 3, 9), id="prefill"),
    ],
)
def test_adds_the_scaled_product_of_the_summed_planes(
    triton_device, dtype, assert_close, rows, slots, ranks, out_features, splits
):
    lora = make_lora_inputs(rows, slots, ranks, 8, out_features, dtype, triton_device)
    inputs = make_inputs(lora, splits)
    assert_close(inputs.run(), inputs.expected)


@pytest.mark.parametrize("popularity", POPULARITIES)
def test_adds_the_products_for_any_popularity_of_adapters(triton_device, assert_close, popularity):
    rows, slots = make_popularity(popularity, num_rows=24, num_slots=16)
    ranks = [(1 + 7 * slot % 40, slot % 3 * 8) for slot in range(16)]
    inputs = make_inputs(make_lora_inputs(rows, slots, ranks, 8, (64, 80), device=triton_device))
    assert_close(inputs.run(), inputs.expected)


@pytest.mark.parametrize(
    ("rows", "num_unused"), [([1, 5, 2, 1, 1, 1], 1), ([1, 17, 2, 1, 1, 110], 7)], ids=["few rows", "more rows"]
)
def test_a_program_processes_several_tiles(triton_device, assert_close, monkeypatch, rows, num_unused):
    from loraserve_kernels.triton_ops import lora_expand, lora_expand_rows

    # Three programs per block of columns: 64 columns in `lora_expand_rows` for float32, 256 in `lora_expand`.
    monkeypatch.setattr(lora_expand_rows, "PROGRAMS", 3 * 6)
    monkeypatch.setattr(lora_expand, "DECODE_PROGRAMS", 3 * 3)
    slots = [0, 1, 2, 3, 4, BASE]
    lora = make_lora_inputs(rows, slots, [(2, 9)] * 5, 8, (300, 20), device=triton_device)
    inputs = make_inputs(lora, 1)
    assert inputs.tiles[:, 3].tolist() == [0, 1, 1, 2, 3, 4] + [BASE] * num_unused
    assert_close(inputs.run(), inputs.expected)


def test_a_program_ends_at_its_first_unused_tile(triton_device, assert_close, monkeypatch):
    """A graph has a tile for each row: with 512 rows of one adapter, 480 of the 512 tiles are unused."""
    from loraserve_kernels.triton_ops import lora_expand_rows

    monkeypatch.setattr(lora_expand_rows, "PROGRAMS", 1)
    inputs = make_inputs(make_lora_inputs([3, 2, 4], [0, 1, 2], [(2,)] * 3, 8, (20,), device=triton_device), 1)
    inputs.tiles[1] = torch.tensor([-1, 0, 0] * 2)
    before = inputs.lora.y.clone()
    found = inputs.run()
    assert_close(found[:3], inputs.expected[:3])
    assert torch.equal(found[3:], before[3:]), "a tile behind an unused one was read"


@pytest.mark.parametrize("num_rows", [1, 64, 257, 320, 512])
def test_a_graphs_launch_starts_few_programs_whatever_its_tile_capacity(triton_device, launches, num_rows):
    from loraserve_kernels.triton_ops import lora_expand, lora_expand_rows

    make_inputs(make_lora_inputs([1] * num_rows, [0] * num_rows, [(1,)] * 2, 8, (28672,), device=triton_device)).run()
    ((name, grid),) = launches
    assert math.prod(grid) <= (lora_expand_rows.PROGRAMS if "rows" in name else lora_expand.DECODE_PROGRAMS)


def test_adds_the_scaled_biases_of_members_that_have_one(triton_device, dtype, assert_close):
    lora = make_lora_inputs([2, 3, 1], [BASE, 0, 1], [(4, 4), (3, 3)], 8, (30, 300), dtype, triton_device)
    lora.table = with_biases(with_biases(lora.table, 0, 3, 300), 1, 2, 30)
    inputs = make_inputs(lora)
    assert_close(inputs.run(), inputs.expected)


@pytest.mark.parametrize("num_rows", [1, 3, 4, 5, 64, 65, 200, 600])
def test_scales_and_shifts_the_columns_of_members_with_dora(triton_device, dtype, assert_close, num_rows):
    """Beside members without DoRA, of the same adapter and of another."""
    rows, slots, ranks = [num_rows, 2, 1], [0, BASE, 1], [(7, 20, 3), (5, 0, 33)]
    dora = [(0, 0), (0, 2), (1, 2)]
    inputs = make_inputs(make_lora_inputs(rows, slots, ranks, 8, (70, 9, 300), dtype, triton_device, dora=dora))
    assert_close(inputs.run(), inputs.expected)


@pytest.mark.parametrize("num_rows", [3, 200], ids=["few rows", "more rows"])
def test_the_tolerance_catches_shifts_that_are_scaled(triton_device, dtype, assert_close, num_rows):
    lora = make_lora_inputs([num_rows], [0], [(4,)], 8, (70,), dtype, triton_device, dora=[(0, 0)])
    inputs = make_inputs(lora)
    magnitude = magnitude_of(lora.table, 0, 2, 70)
    assert magnitude is not None
    magnitude[1] *= magnitude[0]
    with pytest.raises(AssertionError):
        assert_close(inputs.run(), inputs.expected)


@pytest.mark.parametrize("num_rows", [3, 140, 600], ids=["decode", "more rows", "prefill"])
def test_rows_outside_the_tiles_keep_their_bits(triton_device, dtype, num_rows):
    lora = make_lora_inputs([2, num_rows, 2], [BASE, 0, BASE], [(5, 0)], 8, (20, 12), dtype, triton_device)
    storage = lora.y._base
    assert storage is not None
    storage[:2] = float("nan")
    before = storage.clone()
    make_inputs(lora).run()
    storage[2:-2, 2:22] = before[2:-2, 2:22]
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(storage.view(bits), before.view(bits))


def test_the_tolerance_catches_a_lost_plane(triton_device, dtype, assert_close):
    inputs = make_inputs(make_lora_inputs([2], [0], [(64,)], 8, (32,), dtype, triton_device), splits=16)
    inputs.hidden = inputs.hidden[:15]
    with pytest.raises(AssertionError):
        assert_close(inputs.run(), inputs.expected)


def test_two_runs_give_the_same_bits(triton_device, dtype):
    results = [
        make_inputs(make_lora_inputs([3], [0], [(40,)], 8, (70,), dtype, triton_device), 8).run() for _ in range(2)
    ]
    assert torch.equal(*results)
