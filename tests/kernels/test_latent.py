import dataclasses

import pytest
import torch
from loraserve_kernels.adapter_table import AdapterTable
from loraserve_kernels.backend import Backend
from loraserve_kernels.cpu_backend import CpuBackend
from loraserve_kernels.latent import LatentInputs, make_latent_inputs
from loraserve_kernels.lora_add import magnitude_of, matrix
from loraserve_kernels.reference_backend import ReferenceBackend
from loraserve_kernels.step_batch import Segments
from torch import Tensor

BASE = -1
SHAPES = [
    pytest.param(([1], [BASE], [], (1, 1, 1, 1, 1), ()), id="smallest"),
    pytest.param(([1, 1, 1, 1, 1], [BASE, 0, 1, 2, 3], [8, 16, 0, 3], (3, 16, 24, 40, 8), ()), id="decode"),
    pytest.param(([19, 0, 34, 2], [0, 1, BASE, 2], [1, 5, 33], (2, 19, 7, 70, 0), ()), id="ragged"),
    pytest.param(([5, 4], [0, 1], [7, 4], (4, 32, 33, 130, 16), (0, 1)), id="dora"),
    pytest.param(([1, 17, 1, 3], [BASE, 0, 1, 2], [300, 2, 9], (2, 24, 17, 37, 4), (0, 2)), id="some-dora"),
    pytest.param(([1, 66, 2], [0, BASE, 0], [16], (2, 128, 128, 512, 64), ()), id="real-sizes"),
]
"""Segments, ranks, (num_heads, key_dim, value_dim, latent_dim, rotary_dim), and slots with DoRA."""


def inputs_of(shape, dtype=torch.float32, device="cpu") -> LatentInputs:
    rows, slots, ranks, sizes, dora = shape
    inputs = make_latent_inputs(rows, slots, ranks, *sizes, dtype=dtype, dora=dora)
    if device == "cpu":
        return inputs
    for name in ("q", "x"):
        setattr(inputs, name, getattr(inputs, name).to(device))
    for holder in (inputs.table, inputs.segments):
        for field in dataclasses.fields(holder):
            value = getattr(holder, field.name)
            if isinstance(value, Tensor):
                object.__setattr__(holder, field.name, value.to(device))
    inputs.up = dataclasses.replace(inputs.up, weight=inputs.up.weight.to(device))
    return inputs


def row_weights(inputs: LatentInputs) -> list[tuple[Tensor, Tensor]]:
    """For each row the weight and the shift of its up-projection, with the adapter merged into it: float64
    [outputs, latent_dim] and [outputs]."""
    up, table = inputs.up, inputs.table
    member, outputs = up.group.member_start, len(up.weight)
    weights = []
    for slot, count in zip(inputs.segments.adapter_slot.tolist(), inputs.segments.start.diff().tolist(), strict=True):
        weight, shift = up.weight.double(), torch.zeros(outputs, dtype=torch.float64, device=up.weight.device)
        if count and slot != BASE and (rank := int(table.lora_rank[slot, member])):
            a = matrix(table, int(table.offset_a[slot, up.group.group_index]), rank, up.latent_dim).double()
            b = matrix(table, int(table.offset_b[slot, member]), rank, outputs).double()
            weight = weight + float(table.scaling[slot, member]) * b.t() @ a
            magnitude = magnitude_of(table, slot, member, outputs)
            if magnitude is not None:
                weight, shift = weight * magnitude[0].double()[:, None], magnitude[1].double()
        weights += [(weight, shift)] * count
    return weights


def halves(inputs: LatentInputs, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """[outputs, ...] → [num_heads, key_dim, ...], [num_heads, value_dim, ...]."""
    up = inputs.up
    keys, values = outputs.unflatten(0, (up.num_heads, -1)).split([up.key_dim, up.value_dim], dim=1)
    return keys, values


@pytest.mark.parametrize("shape", SHAPES)
def test_absorbed_queries_score_latents_as_queries_score_keys(backend, device, dtype, assert_close, shape):
    inputs = inputs_of(shape, dtype, device)
    q, up = inputs.q, inputs.up
    found = backend.absorb_keys(q, up, inputs.table, inputs.segments)
    weights = [halves(inputs, weight)[0] for weight, _ in row_weights(inputs)]
    nope = q[..., : up.key_dim].double()
    latents = torch.stack(
        [torch.einsum("hk,hkc->hc", rows, weight) for rows, weight in zip(nope, weights, strict=True)]
    )
    assert_close(found[..., : up.latent_dim], latents)
    assert torch.equal(found[..., up.latent_dim :], q[..., up.key_dim :])


@pytest.mark.parametrize("shape", SHAPES)
def test_expands_each_rows_latents_with_its_adapter(backend, device, dtype, assert_close, shape):
    inputs = inputs_of(shape, dtype, device)
    found = backend.expand_values(inputs.x, inputs.up, inputs.table, inputs.segments)
    expected = [
        torch.einsum("hvc,hc->hv", halves(inputs, weight)[1], row[:, : inputs.up.latent_dim].double())
        + halves(inputs, shift)[1]
        for (weight, shift), row in zip(row_weights(inputs), inputs.x, strict=True)
    ]
    assert_close(found, torch.stack(expected))


def with_biases(inputs: LatentInputs, slot: int) -> Tensor:
    """Give B of one adapter a bias; returns it."""
    table, up = inputs.table, inputs.up
    bias = torch.randn(len(up.weight), generator=torch.Generator().manual_seed(3)).to(table.arena.dtype)
    table.offset_bias = torch.full_like(table.offset_b, -1)
    table.offset_bias[slot, up.group.member_start] = table.arena.numel()
    table.num_biased = 1
    table.arena = torch.cat([table.arena, bias])
    return bias


def test_values_have_their_part_of_a_bias(backend, device, assert_close):
    inputs = inputs_of(([1, 2, 3], [0, BASE, 1], [4, 8], (3, 8, 12, 20, 4), ()), device=device)
    without = backend.expand_values(inputs.x, inputs.up, inputs.table, inputs.segments)
    queries = backend.absorb_keys(inputs.q, inputs.up, inputs.table, inputs.segments)
    bias = with_biases(inputs, 1).double() * float(inputs.table.scaling[1, inputs.up.group.member_start])
    expected = without.double()
    expected[3:] += halves(inputs, bias)[1]
    assert_close(backend.expand_values(inputs.x, inputs.up, inputs.table, inputs.segments), expected)
    assert torch.equal(backend.absorb_keys(inputs.q, inputs.up, inputs.table, inputs.segments), queries)


def both(backend: Backend, inputs: LatentInputs, table: AdapterTable | None, segments: Segments) -> list[Tensor]:
    return [
        backend.absorb_keys(inputs.q, inputs.up, table, segments),
        backend.expand_values(inputs.x, inputs.up, table, segments),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(3, 24, 17, 37, 4), (2, 128, 64, 512, 64)])
def test_a_rows_bits_do_not_depend_on_its_batch(lanes_library, dtype, sizes):
    rows, slots = [7, 1, 20, 16], [0, BASE, 1, 2]
    cpu = CpuBackend(lanes_library)
    inputs = make_latent_inputs(rows, slots, [5, 16, 3], *sizes, dtype=dtype, dora=(2,))
    together = both(cpu, inputs, inputs.table, inputs.segments)
    row_slots = [slot for slot, count in zip(slots, rows, strict=True) for _ in range(count)]
    for row, slot in enumerate(row_slots):
        alone = dataclasses.replace(inputs, q=inputs.q[row : row + 1], x=inputs.x[row : row + 1])
        start, slot_tensor = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([slot], dtype=torch.int32)
        segments = Segments(start, slot_tensor, has_adapter=slot != BASE)
        for result, whole in zip(both(cpu, alone, inputs.table, segments), together, strict=True):
            assert torch.equal(result[0], whole[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_kind_of_vectors_computes_the_same(any_library, dtype, assert_close):
    inputs = make_latent_inputs([9, 1], [0, BASE], [6], 3, 21, 35, 50, 6, dtype=dtype)
    reference = make_latent_inputs([9, 1], [0, BASE], [6], 3, 21, 35, 50, 6, dtype=torch.float32)
    for name in ("q", "x"):
        setattr(reference, name, getattr(inputs, name).float())
    reference.table.arena = inputs.table.arena.float()
    reference.up = dataclasses.replace(reference.up, weight=inputs.up.weight.float())
    found = both(CpuBackend(any_library), inputs, inputs.table, inputs.segments)
    for result, expected in zip(
        found, both(ReferenceBackend(), reference, reference.table, reference.segments), strict=True
    ):
        assert_close(result, expected.double())


def test_no_table_is_the_base_model(backend, device):
    inputs = inputs_of(([3, 2], [0, BASE], [4], (2, 8, 8, 16, 4), ()), device=device)
    no_adapters = Segments(inputs.segments.start, torch.full_like(inputs.segments.adapter_slot, BASE), False)
    assert all(
        map(torch.equal, both(backend, inputs, None, inputs.segments), both(backend, inputs, inputs.table, no_adapters))
    )


def test_no_rows(backend, device):
    inputs = inputs_of(([0], [BASE], [], (2, 8, 12, 16, 4), ()), device=device)
    keys, values = both(backend, inputs, inputs.table, inputs.segments)
    assert keys.shape == (0, 2, 20)
    assert values.shape == (0, 2, 12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: {"q": i.q[:, :1]}, "q is .* 2"),
        (lambda i: {"q": i.q[..., :7]}, "q is .* at least 8"),
        (lambda i: {"q": i.q.double()}, "weight"),
        (lambda i: {"up": dataclasses.replace(i.up, weight=i.up.weight[:-1])}, "weight is .* a multiple of 2 outputs"),
        (lambda i: {"up": dataclasses.replace(i.up, weight=i.up.weight[:, :8])}, "weight"),
        (lambda i: {"up": dataclasses.replace(i.up, key_dim=20)}, "weight is .* more than 20"),
        (lambda i: {"up": dataclasses.replace(i.up, weight=i.up.weight[:, :8].contiguous())}, "group is"),
    ],
)
def test_refuses_what_does_not_fit(backend, device, change, message):
    inputs = inputs_of(([3], [0], [4], (2, 8, 12, 16, 24), ()), device=device)
    changed = dataclasses.replace(inputs, **change(inputs))
    with pytest.raises(ValueError, match=message):
        backend.absorb_keys(changed.q, changed.up, changed.table, changed.segments)


def test_refuses_too_few_latents(backend, device):
    inputs = inputs_of(([3], [0], [4], (2, 8, 12, 16, 4), ()), device=device)
    with pytest.raises(ValueError, match=r"x is .* at least 16"):
        backend.expand_values(inputs.x[..., :15], inputs.up, inputs.table, inputs.segments)


@pytest.mark.parametrize("name", ["offset_a", "offset_b"])
def test_an_adapter_outside_the_arena_is_refused(cpu, name):
    inputs = make_latent_inputs([3], [0], [4], 2, 8, 12, 16, 4)
    getattr(inputs.table, name)[0] = inputs.table.arena.numel() - 3
    with pytest.raises(ValueError, match="outside the adapter table or its arena"):
        cpu.expand_values(inputs.x, inputs.up, inputs.table, inputs.segments)


def test_segments_of_other_rows_are_refused(cpu):
    inputs = make_latent_inputs([3], [0], [4], 2, 8, 12, 16, 4)
    with pytest.raises(ValueError, match="row ranges"):
        cpu.absorb_keys(inputs.q[:2], inputs.up, inputs.table, inputs.segments)
