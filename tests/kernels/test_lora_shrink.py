from types import ModuleType

import pytest
import torch
from loraserve_kernels.adapter_table import MAX_LORA_RANK
from loraserve_kernels.lora_add import (
    POPULARITIES,
    LoraInputs,
    lora_add_reference,
    make_lora_inputs,
    make_popularity,
    matrix,
)
from loraserve_kernels.lora_tiles import DECODE_MAX_ROWS, tiles_of
from torch import Tensor

BASE = -1


def lora_shared() -> ModuleType:
    pytest.importorskip("triton")
    from loraserve_kernels.triton_ops import lora_shared

    return lora_shared


def want_programs(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    from loraserve_kernels.triton_ops import lora_shrink

    for module in (lora_shared(), lora_shrink):
        monkeypatch.setattr(module, "TARGET_PROGRAMS", number)


def shrink(inputs: LoraInputs, num_unused: int = 0) -> Tensor:
    """The planes to be added up. num_unused: extra unused entries at the end of the work list."""
    from loraserve_kernels.triton_ops.lora_shrink import lora_shrink

    tiles = tiles_of(inputs.segments, inputs.x.shape[0])
    num_used = int((tiles[:, 0] >= 0).sum())
    unused = tiles.new_tensor([BASE, num_used, 0, BASE, int((tiles[:, 3] >= 0).sum()), 0])
    tiles = torch.cat([tiles, unused.expand(num_unused, 6)])
    planes = lora_shrink(inputs.x, inputs.group, inputs.table, tiles)
    if inputs.x.shape[0] > DECODE_MAX_ROWS:
        return planes
    num_planes = 1
    while 2 * num_planes <= planes.shape[0] and num_used * 2 * num_planes <= lora_shared().TARGET_PROGRAMS:
        num_planes *= 2
    return planes[:num_planes]


def assert_planes_add_up(planes: Tensor, inputs: LoraInputs) -> None:
    """To x Aᵀ in float64, whose elements are about 1, within the rounding of up to 1,500 terms in float32."""
    table, group = inputs.table, inputs.group
    starts = inputs.segments.start.tolist()
    for slot, first, end in zip(inputs.segments.adapter_slot.tolist(), starts[:-1], starts[1:], strict=True):
        ranks = [] if slot == BASE else table.lora_rank[slot, group.member_start :].tolist()
        if not sum(ranks):
            continue
        a = matrix(table, int(table.offset_a[slot, group.group_index]), sum(ranks), group.in_features)
        expected = inputs.x[first:end].double() @ a.double().T
        for member, columns in enumerate(expected.split(ranks, dim=1)):
            found = planes[:, first:end, member * MAX_LORA_RANK :][..., : columns.shape[1]]
            torch.testing.assert_close(found.double().sum(0), columns, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("rows", "slots", "ranks", "in_features"),
    [
        pytest.param([1], [0], [(1,)], 1, id="smallest"),
        pytest.param([3, 2], [0, 1], [(1, 1, 1), (1, 0, 1)], 17, id="rank-1"),
        pytest.param([2, 5], [0, 1], [(512, 3, 512), (512, 512, 512)], 130, id="largest-ranks"),
        pytest.param([2, 1, 37, 4], [BASE, 0, 1, 2], [(33, 16), (16, 64), (8, 33)], 101, id="mixed-ranks"),
        pytest.param([4, 0, 3, 0], [BASE, 0, 1, 2], [(4,), (5,), (6,)], 32, id="empty-segments"),
        pytest.param([3, 3], [0, 1], [(0, 9, 0), (0, 0, 0)], 40, id="absent-members"),
        pytest.param([515, 1, 5], [0, BASE, 1], [(20, 7), (70, 0)], 77, id="prefill"),
        pytest.param([1, 2], [0, 1], [(5, 8), (16, 2)], 1500, id="split"),
    ],
)
def test_planes_add_up_to_x_times_a_transposed(triton_device, dtype, rows, slots, ranks, in_features):
    inputs = make_lora_inputs(rows, slots, ranks, in_features, (8,) * len(ranks[0]), dtype, triton_device)
    planes = shrink(inputs)
    assert planes.dtype == torch.float32
    assert_planes_add_up(planes, inputs)


@pytest.mark.parametrize("popularity", POPULARITIES)
def test_planes_add_up_for_any_popularity_of_adapters(triton_device, popularity):
    rows, slots = make_popularity(popularity, num_rows=24, num_slots=16)
    ranks = [(1 + 7 * slot % 40, slot % 3 * 8) for slot in range(16)]
    inputs = make_lora_inputs(rows, slots, ranks, 96, (8, 8), device=triton_device)
    assert_planes_add_up(shrink(inputs), inputs)


def test_few_tiles_are_split_and_every_plane_counts(triton_device):
    inputs = make_lora_inputs([3], [0], [(20,)], 1100, (8,), device=triton_device)
    planes = shrink(inputs)
    assert planes.shape[0] == 4
    planes[3, 2, 19] = 0
    with pytest.raises(AssertionError):
        assert_planes_add_up(planes, inputs)


@pytest.mark.parametrize(("num_programs", "num_planes"), [(11, 1), (12, 2), (23, 2), (24, 4), (1000, 4)])
def test_the_tiles_in_use_are_split_for_the_target_number_of_programs(
    triton_device, monkeypatch, num_programs, num_planes
):
    want_programs(monkeypatch, num_programs)
    inputs = make_lora_inputs([1] * 5 + [17], [0, 1] * 3, [(20, 9), (40, 0)], 1100, (8, 8), device=triton_device)
    inputs.segments.start[-1] -= 1  # so the sixth segment has one tile; a padding row follows
    planes = shrink(inputs)
    assert planes.shape[0] == num_planes
    assert_planes_add_up(planes, inputs)


def test_unused_entries_in_the_work_list_change_no_bit(triton_device):
    """A graph's work list is longer than a step needs."""
    inputs = make_lora_inputs([3, 20], [0, 1], [(20, 70), (40, 3)], 1100, (8, 8), device=triton_device)
    exact, roomy = shrink(inputs), shrink(inputs, num_unused=600)
    assert exact.shape == roomy.shape
    for rows, ranks in ((slice(0, 3), (20, 70)), (slice(3, 23), (40, 3))):
        for member, lora_rank in enumerate(ranks):
            columns = slice(member * MAX_LORA_RANK, member * MAX_LORA_RANK + lora_rank)
            assert torch.equal(exact[:, rows, columns], roomy[:, rows, columns])


@pytest.mark.parametrize("num_rows", [40, 200])
def test_expand_adds_only_the_planes_in_use(triton_device, assert_close, monkeypatch, num_rows):
    from loraserve_kernels.triton_backend import TritonBackend

    want_programs(monkeypatch, 1)
    inputs = make_lora_inputs([num_rows], [0], [(20,)], 1100, (8,), device=triton_device)
    expected = inputs.y.double()
    lora_add_reference(expected, inputs.x, inputs.group, inputs.table, inputs.segments)
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: torch.full(shape, float("nan"), **options))
    TritonBackend().lora_add(inputs.y, inputs.x, inputs.group, inputs.table, inputs.segments)
    assert_close(inputs.y, expected)


def test_the_number_of_planes_depends_on_shapes_alone():
    pytest.importorskip("triton")
    from loraserve_kernels.triton_ops.lora_shrink import num_splits

    assert num_splits(1, 1, is_decode=True) == 1
    assert num_splits(512, 4096, is_decode=True) == 16
    assert num_splits(512, 1600, is_decode=True) == 4
    assert num_splits(17, 4096, is_decode=False) == 4
    assert num_splits(129, 14336, is_decode=False) == 1


def test_two_runs_give_the_same_bits(triton_device):
    inputs = make_lora_inputs([1, 1], [0, 1], [(40,), (8,)], 1100, (8,), device=triton_device)
    first = shrink(inputs)
    second = shrink(inputs)
    for row, lora_rank in ((0, 40), (1, 8)):
        assert torch.equal(first[:, row, :lora_rank], second[:, row, :lora_rank])


def test_a_row_does_not_depend_on_its_neighbors(triton_device):
    """NaN in rows of the base model and of other adapters stays there."""
    inputs = make_lora_inputs([2, 3, 2], [BASE, 0, 1], [(9,), (4,)], 50, (8,), device=triton_device)
    inputs.x[:2] = inputs.x[5:] = inputs.x[3] = float("nan")
    planes = shrink(inputs)
    assert planes[:, 2, :9].isfinite().all()
    assert planes[:, 4, :9].isfinite().all()
    assert planes[:, 3, :9].isnan().all()
