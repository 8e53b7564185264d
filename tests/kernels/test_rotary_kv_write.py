import pytest
import torch
from loraserve_kernels.cpu_backend import CpuBackend
from loraserve_kernels.rotary_kv_write import RotaryInputs, make_rotary_inputs


def run(backend, inputs: RotaryInputs) -> None:
    kv = inputs.kv
    backend.rotary_kv_write(inputs.q, kv.k, kv.v, inputs.cos, inputs.sin, kv.k_cache, kv.v_cache, kv.slot_mapping)


def rotated(x: torch.Tensor, inputs: RotaryInputs) -> torch.Tensor:
    """Each pair (i, i + rotary_dim / 2) rotated by its angle, in float64."""
    x = x.double().clone()
    half = inputs.cos.shape[1] // 2
    for i in range(half):
        cos, sin = inputs.cos[:, i, None].double(), inputs.sin[:, i, None].double()
        low, high = x[..., i].clone(), x[..., i + half].clone()
        x[..., i] = low * cos - high * sin
        x[..., i + half] = high * cos + low * sin
    return x


@pytest.mark.parametrize(
    ("num_rows", "heads", "kv_heads", "head_dim", "rotary_dim"),
    [
        (1, 4, 2, 16, 16),
        (37, 3, 3, 24, 24),
        (19, 6, 2, 40, 12),
        (130, 12, 4, 64, 64),
        (5, 2, 1, 128, 126),
        (0, 2, 1, 8, 8),
    ],
)
def test_rotates_q_in_place_and_stores_rotated_k_and_unrotated_v(
    backend, device, dtype, assert_close, num_rows, heads, kv_heads, head_dim, rotary_dim
):
    inputs = make_rotary_inputs(num_rows, heads, kv_heads, head_dim, rotary_dim, dtype, device)
    expected_q, expected_k = rotated(inputs.q, inputs), rotated(inputs.kv.k, inputs)
    k_before = inputs.kv.k.clone()
    run(backend, inputs)
    assert_close(inputs.q.clone(), expected_q)
    k_slots, v_slots = (cache.transpose(1, 2).flatten(0, 1) for cache in (inputs.kv.k_cache, inputs.kv.v_cache))
    assert_close(k_slots[inputs.kv.slot_mapping], expected_k)
    assert torch.equal(v_slots[inputs.kv.slot_mapping], inputs.kv.v)
    assert torch.equal(inputs.kv.k, k_before)
    unused = torch.ones(k_slots.shape[0], dtype=torch.bool, device=device)
    unused[inputs.kv.slot_mapping] = False
    assert k_slots[unused].isnan().all()


def test_the_tolerance_catches_a_slightly_wrong_angle(backend, device, assert_close):
    inputs = make_rotary_inputs(9, 2, 1, 32, 32, device=device)
    expected = rotated(inputs.q, inputs)
    inputs.sin = inputs.sin * 1.001
    run(backend, inputs)
    with pytest.raises(AssertionError):
        assert_close(inputs.q.clone(), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: setattr(i, "q", i.q[:2]), "q is"),
        (lambda i: setattr(i, "cos", i.cos[:, :7]), "cos is"),
        (lambda i: setattr(i, "sin", i.sin.half()), "sin.dtype"),
        (lambda i: setattr(i, "sin", i.sin[:, :8].contiguous()), "sin is"),
    ],
)
def test_refuses_wrong_shapes_and_dtypes(backend, device, change, message):
    inputs = make_rotary_inputs(5, 2, 1, 16, 16, device=device)
    change(inputs)
    with pytest.raises(ValueError, match=message):
        run(backend, inputs)


def test_c_refuses_a_slot_outside_the_cache_and_changes_nothing(cpu_library):
    inputs = make_rotary_inputs(5, 2, 1, 16, 16)
    inputs.kv.slot_mapping[3] = -1
    before = inputs.q.clone()
    with pytest.raises(ValueError, match="slot_mapping"):
        run(CpuBackend(cpu_library), inputs)
    assert torch.equal(inputs.q, before)
    assert inputs.kv.k_cache.isnan().all()


def test_triton_skips_the_padding_of_a_captured_graph(triton_device):
    from loraserve_kernels.triton_ops.rotary_kv_write import rotary_kv_write

    inputs = make_rotary_inputs(5, 2, 1, 16, 16, device=triton_device)
    kv, padding = inputs.kv, [1, 4]
    kv.slot_mapping[padding] = -1
    q_before, expected = inputs.q.clone(), rotated(inputs.q, inputs).float()
    rotary_kv_write(inputs.q, kv.k, kv.v, inputs.cos, inputs.sin, kv.k_cache, kv.v_cache, kv.slot_mapping)
    assert torch.equal(inputs.q[padding], q_before[padding])
    torch.testing.assert_close(inputs.q[[0, 2, 3]], expected[[0, 2, 3]])
    for cache in (kv.k_cache, kv.v_cache):
        by_slot = cache.transpose(1, 2).flatten(0, 1)
        assert not by_slot[kv.slot_mapping[[0, 2, 3]]].isnan().any()
        assert by_slot.isnan().all(dim=(1, 2)).sum() == len(by_slot) - 3
