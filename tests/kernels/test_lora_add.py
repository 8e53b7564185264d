import dataclasses

import pytest
import torch
from loraserve_kernels.adapter_table import AdapterTable
from loraserve_kernels.cpu_backend import CpuBackend
from loraserve_kernels.lora_add import (
    POPULARITIES,
    LoraInputs,
    magnitude_of,
    make_lora_inputs,
    make_popularity,
    matrix,
)
from torch import Tensor

BASE = -1


def expected_y(inputs: LoraInputs) -> Tensor:
    """In float64, row by row: y + scaling (x Aᵀ) B; with DoRA, that times the factors plus the shifts."""
    y, x, table, group = inputs.y.double(), inputs.x.double(), inputs.table, inputs.group
    lengths = inputs.segments.start.diff().tolist()
    row_slots = [s for s, n in zip(inputs.segments.adapter_slot.tolist(), lengths, strict=True) for _ in range(n)]
    for row, slot in enumerate(row_slots):
        if slot == BASE:
            continue
        ranks = table.lora_rank[slot, group.member_start :].tolist()
        if not sum(ranks):
            continue
        a = matrix(table, int(table.offset_a[slot, group.group_index]), sum(ranks), group.in_features).double()
        hidden = (a @ x[row]).split(ranks)
        columns = y[row].split(list(group.out_features))
        for member, (rank, h, out) in enumerate(zip(ranks, hidden, columns, strict=True), start=group.member_start):
            if rank:
                b = matrix(table, int(table.offset_b[slot, member]), rank, out.shape[0]).double()
                out += float(table.scaling[slot, member]) * (h @ b)
                magnitude = magnitude_of(table, slot, member, out.shape[0])
                if magnitude is not None:
                    out.mul_(magnitude[0].double()).add_(magnitude[1].double())
    return y


def run(backend, inputs: LoraInputs) -> Tensor:
    backend.lora_add(inputs.y, inputs.x, inputs.group, inputs.table, inputs.segments)
    return inputs.y


@pytest.mark.parametrize(
    ("rows", "slots", "ranks", "in_features", "out_features"),
    [
        pytest.param([1] * 5, [0, 1, 2, 3, 4], [(8, 8)] * 5, 64, (96, 32), id="decode"),
        pytest.param([1], [0], [(1,)], 1, (1,), id="smallest"),
        pytest.param([3, 2], [0, 1], [(1, 1, 1), (1, 0, 1)], 17, (19, 5, 33), id="rank-1"),
        pytest.param([2, 5], [0, 1], [(512,), (3,)], 130, (257,), id="rank-512"),
        pytest.param([2, 1, 67, 4], [BASE, 0, 1, 2], [(33, 16), (16, 64), (8, 33)], 101, (300, 70), id="mixed-ranks"),
        pytest.param([4, 0, 3, 0], [BASE, 0, 1, 2], [(4,), (5,), (6,)], 32, (48,), id="empty-segments"),
        pytest.param([3, 3], [0, 1], [(0, 9, 0), (0, 0, 0)], 40, (24, 40, 8), id="absent-members"),
        pytest.param([150, 1], [0, 1], [(16, 16), (8, 8)], 256, (1100, 64), id="prefill-and-decode"),
    ],
)
def test_adds_the_low_rank_product_of_each_rows_adapter(
    backend, device, dtype, assert_close, rows, slots, ranks, in_features, out_features
):
    inputs = make_lora_inputs(rows, slots, ranks, in_features, out_features, dtype, device)
    expected = expected_y(inputs)
    assert_close(run(backend, inputs), expected)


DORA_CASES = [
    pytest.param([1], [0], [(1,)], 1, (1,), [(0, 0)], id="smallest"),
    pytest.param(
        [1, 3, 1, 4, 5], [0, 1, BASE, 2, 0], [(8, 3), (5, 0), (9, 16)], 33, (19, 70), [(0, 0), (2, 1)], id="few"
    ),
    pytest.param([64, 2, 65], [0, BASE, 1], [(16, 4), (3, 3)], 40, (24, 109), [(0, 0), (0, 1), (1, 0)], id="blocks"),
    pytest.param([200, 1], [0, 1], [(7, 33), (2, 2)], 20, (130, 9), [(0, 1), (1, 0)], id="many"),
    pytest.param([1, 5], [0, 1], [(3, 3)] * 2, 8, (2077, 4099), [(0, 0), (0, 1), (1, 1)], id="wide"),
]
"""Rows and slots of segments, ranks, in_features, out_features, and the slots and members with DoRA."""


@pytest.mark.parametrize(("rows", "slots", "ranks", "in_features", "out_features", "dora"), DORA_CASES)
def test_dora_scales_and_shifts_the_sum_of_y_and_the_product(
    backend, device, dtype, assert_close, rows, slots, ranks, in_features, out_features, dora
):
    inputs = make_lora_inputs(rows, slots, ranks, in_features, out_features, dtype, device, dora=dora)
    expected = expected_y(inputs)
    assert_close(run(backend, inputs), expected)


@pytest.mark.parametrize(("rows", "slots", "ranks", "in_features", "out_features", "dora"), DORA_CASES)
def test_dora_does_not_change_the_bits_of_rows_and_members_without_it(
    backend, device, dtype, rows, slots, ranks, in_features, out_features, dora
):
    without, beside = (
        make_lora_inputs(rows, slots, ranks, in_features, out_features, dtype, device, dora=some) for some in ([], dora)
    )
    is_scaled = torch.zeros(without.y.shape, dtype=torch.bool)
    starts = without.segments.start.tolist()
    for slot, first, end in zip(slots, starts[:-1], starts[1:], strict=True):
        for member, columns in enumerate(is_scaled[first:end].split(list(out_features), dim=1)):
            columns[:] = (slot, member) in dora
    before, after = run(backend, without).cpu(), run(backend, beside).cpu()
    assert torch.equal(bits(before[~is_scaled]), bits(after[~is_scaled]))
    assert not torch.equal(before[is_scaled], after[is_scaled])


@pytest.mark.parametrize("popularity", POPULARITIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_adds_the_products_for_any_popularity_of_adapters(backend, device, dtype, assert_close, popularity):
    rows, slots = make_popularity(popularity, num_rows=24, num_slots=16)
    ranks = [(1 + 7 * slot % 40, slot % 3 * 8) for slot in range(16)]
    inputs = make_lora_inputs(rows, slots, ranks, 96, (64, 80), dtype, device)
    expected = expected_y(inputs)
    assert_close(run(backend, inputs), expected)


def test_base_rows_absent_members_and_neighboring_columns_keep_their_bits(backend, device, dtype):
    inputs = make_lora_inputs([3, 2, 4], [BASE, 0, 1], [(8, 0), (0, 8)], 64, (48, 40), dtype, device)
    inputs.y[0, :2] = torch.tensor([float("nan"), -0.0])
    storage = inputs.y._base
    assert storage is not None
    before = storage.clone()
    run(backend, inputs)
    touched = torch.zeros_like(storage, dtype=torch.bool)
    view = torch.as_strided(touched, inputs.y.shape, inputs.y.stride(), inputs.y.storage_offset())
    view[3:5, :48] = view[5:9, 48:] = True
    assert torch.equal(bits(storage)[~touched], bits(before)[~touched])
    assert not torch.equal(storage[touched], before[touched])


def test_a_batch_of_only_base_rows_is_not_changed(backend, device):
    inputs = make_lora_inputs([4], [BASE], [(8,)], 32, (16,), device=device)
    before = inputs.y.clone()
    assert not inputs.segments.has_adapter
    assert torch.equal(run(backend, inputs), before)


def test_only_a_batch_with_an_adapter_launches_triton_kernels(triton_device, launches):
    from loraserve_kernels.triton_backend import TritonBackend

    run(TritonBackend(), make_lora_inputs([4], [BASE], [(8,)], 32, (16,), device=triton_device))
    assert launches == []
    run(TritonBackend(), make_lora_inputs([3, 1], [BASE, 0], [(8,)], 32, (16,), device=triton_device))
    assert [name for name, _ in launches] == ["_lora_shrink_kernel", "_lora_expand_rows_kernel"]


@pytest.mark.parametrize("dora", [[], [(0, 0), (0, 1)]], ids=["without dora", "dora"])
def test_a_rows_bits_do_not_depend_on_its_batch(any_library, dora):
    for dtype in (torch.float32, torch.bfloat16):
        backend = CpuBackend(any_library)
        together = make_lora_inputs([131], [0], [(33, 16)], 200, (300, 1048), dtype, dora=dora)
        alone = make_lora_inputs([131], [0], [(33, 16)], 200, (300, 1048), dtype, dora=dora)
        run(backend, together)
        rows = tuple(range(131))  # all, because fused and separate multiply-adds differ in only a few
        for row in rows:
            segments = dataclasses.replace(alone.segments, start=torch.tensor([0, 1], dtype=torch.int32))
            one = dataclasses.replace(alone, x=alone.x[row : row + 1], y=alone.y[row : row + 1], segments=segments)
            run(backend, one)
        assert torch.equal(alone.y[rows, :], together.y[rows, :])


@pytest.mark.parametrize("dora", [[], [(0, 0), (1, 1)]], ids=["without dora", "beside dora"])
def test_adds_the_biases_of_members_that_have_one(backend, device, dtype, assert_close, dora):
    inputs = make_lora_inputs([2, 3, 1], [BASE, 0, 1], [(8, 3), (2, 5)], 20, (16, 24), dtype, device, dora=dora)
    table = inputs.table
    bias = torch.randn(24, generator=torch.Generator().manual_seed(2)).to(table.arena)
    table.offset_bias = torch.full_like(table.offset_b, -1)
    table.offset_bias[0, 3] = table.arena.numel()
    table.num_biased = 1
    table.arena = torch.cat([table.arena, bias])
    expected = expected_y(inputs)
    expected[2:5, 16:] += bias.double() * float(table.scaling[0, 3])
    # Two roundings if the bias is added separately.
    found = run(backend, inputs)
    assert_close(found[:, :16], expected[:, :16])
    torch.testing.assert_close(found.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=5e-3)


def test_the_tolerance_catches_a_lost_rank(backend, device, dtype, assert_close):
    inputs = make_lora_inputs([2], [0], [(64,)], 64, (32,), dtype, device)
    expected = expected_y(inputs)
    inputs.table.lora_rank[0, 2] = 63
    with pytest.raises(AssertionError):
        assert_close(run(backend, inputs), expected)


def test_the_tolerance_catches_the_factors_of_the_next_columns(backend, device, dtype, assert_close):
    inputs = make_lora_inputs([2], [0], [(4,)], 64, (32,), dtype, device, dora=[(0, 0)])
    expected = expected_y(inputs)
    inputs.table.offset_magnitude[0, 2] += 4 // inputs.table.arena.element_size()
    inputs.table.arena.nan_to_num_()
    with pytest.raises(AssertionError):
        assert_close(run(backend, inputs), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: {"x": i.x[:, :-1]}, "x is"),
        (lambda i: {"y": i.y[:-1]}, "y is 2 rows"),
        (lambda i: {"x": i.x.half()}, "x.dtype"),
        (lambda i: {"y": i.y.double()}, "y.dtype"),
        (lambda i: {"x": i.x.repeat(1, 2)[:, ::2]}, "stride of x"),
        (
            lambda i: {"segments": dataclasses.replace(i.segments, start=i.segments.start.long())},
            "segments.start.dtype",
        ),
        (lambda i: {"segments": dataclasses.replace(i.segments, start=i.segments.start[1:])}, "segments.start is"),
    ],
)
def test_refuses_wrong_shapes_dtypes_and_strides(backend, device, change, message):
    inputs = make_lora_inputs([3], [0], [(4,)], 32, (16,), device=device)
    with pytest.raises(ValueError, match=message):
        run(backend, dataclasses.replace(inputs, **change(inputs)))


@pytest.mark.parametrize("backend", ["reference", "cpu"], indirect=True)
def test_refuses_an_adapter_outside_the_arena(backend):
    inputs = make_lora_inputs([3], [0], [(4,)], 32, (16,))
    inputs.table.offset_b[0, 2] = inputs.table.arena.numel() - 4 * 16 + 1
    with pytest.raises(ValueError, match="arena"):
        run(backend, inputs)


@pytest.mark.parametrize("backend", ["reference", "cpu"], indirect=True)
@pytest.mark.parametrize(
    ("dtype", "wrong"),
    [
        pytest.param(torch.float32, lambda offset: offset + 1, id="float32-behind-the-end"),
        pytest.param(torch.bfloat16, lambda offset: offset + 2, id="bfloat16-behind-the-end"),
        pytest.param(torch.bfloat16, lambda _: (1 << 63) - 2, id="far-behind-the-end"),
        pytest.param(torch.bfloat16, lambda offset: offset + 1, id="not-at-4-bytes"),
    ],
)
def test_refuses_a_magnitude_outside_the_arena_or_not_aligned_to_a_float(backend, dtype, wrong):
    """The second adapter's is wrong; C refuses it before it adds anything of the first."""
    inputs = make_lora_inputs([3, 1], [0, 1], [(4, 4)] * 2, 32, (16, 24), dtype, dora=[(1, 1)])
    offset, before = inputs.table.offset_magnitude[1, 3], inputs.y.clone()
    end = int(offset) + 2 * 24 * 4 // dtype.itemsize
    inputs.table.arena = inputs.table.arena[:end].clone()
    offset.fill_(wrong(int(offset)))
    with pytest.raises(ValueError, match="arena"):
        run(backend, inputs)
    assert backend.name == "reference" or torch.equal(inputs.y, before)


def test_a_magnitude_at_the_arenas_end_is_read(cpu, assert_close):
    inputs = make_lora_inputs([3], [0], [(4,)], 32, (17,), torch.bfloat16, dora=[(0, 0)])
    end = int(inputs.table.offset_magnitude[0, 2]) + 2 * 17 * 2
    inputs.table.arena = inputs.table.arena[:end].clone()
    expected = expected_y(inputs)
    assert_close(run(cpu, inputs), expected)


def test_refuses_a_negative_rank(cpu):
    inputs = make_lora_inputs([3], [0], [(4, 4)], 32, (16, 16))
    inputs.table.lora_rank[0, 3] = -4
    with pytest.raises(ValueError, match="rank"):
        run(cpu, inputs)


def test_the_slot_of_an_empty_segment_is_not_read(cpu):
    inputs = make_lora_inputs([3], [0], [(4,)], 32, (16,))
    expected = expected_y(inputs)
    start, slot = torch.tensor([0, 0, 3], dtype=torch.int32), torch.tensor([10**8, 0], dtype=torch.int32)
    inputs.segments = dataclasses.replace(inputs.segments, start=start, adapter_slot=slot)
    assert torch.allclose(run(cpu, inputs).double(), expected, atol=1e-4)


def test_reads_table_rows_changed_between_steps(backend, device, assert_close):
    inputs = make_lora_inputs([3], [0], [(4,), (9,)], 32, (16,), device=device, dora=[(1, 0)])
    run(backend, inputs)
    for name in ("offset_a", "offset_b", "lora_rank", "scaling", "offset_magnitude"):
        getattr(inputs.table, name)[0] = getattr(inputs.table, name)[1]
    inputs.table = AdapterTable(*(getattr(inputs.table, field.name) for field in dataclasses.fields(AdapterTable)))
    expected = expected_y(inputs)
    assert_close(run(backend, inputs), expected)


def test_magnitudes_added_to_a_table_later_are_used(backend, device, assert_close):
    inputs = make_lora_inputs([3], [0], [(4,)], 32, (16,), device=device, dora=[(0, 0)])
    right = inputs.table.offset_magnitude
    for offsets in (right[:0], right, torch.full_like(right, -1), right.clone()):
        inputs.table.offset_magnitude = offsets
        expected = expected_y(inputs)
        assert_close(run(backend, inputs), expected)


@pytest.mark.parametrize("name", ["offset_b", "offset_magnitude"])
def test_a_valid_table_is_checked_once_and_an_invalid_one_is_refused_after_it(triton_device, monkeypatch, name):
    from loraserve_kernels import triton_backend

    checked = []
    check = triton_backend.check_adapter_table
    monkeypatch.setattr(triton_backend, "check_adapter_table", lambda *each: (checked.append(each), check(*each)))
    backend = triton_backend.TritonBackend()
    inputs = make_lora_inputs([3], [0], [(4,), (9,)], 32, (16,), device=triton_device, dora=[(1, 0)])
    for _ in range(3):
        run(backend, inputs)
    assert len(checked) == 1
    right = getattr(inputs.table, name)
    for wrong in (right.int(), right[:1], right[:, :2], right.to("meta")):
        setattr(inputs.table, name, wrong)
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"table\.{name}"):
                run(backend, inputs)
    setattr(inputs.table, name, right.clone())
    run(backend, inputs)
    assert len(checked) == 1 + 2 * 4 + 1


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int32 if values.dtype == torch.float32 else torch.int16)
