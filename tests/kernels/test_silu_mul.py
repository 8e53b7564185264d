import pytest
import torch
from loraserve_kernels.silu_mul import make_silu_mul_inputs


def expected_output(gate, up):
    return gate.double() * torch.sigmoid(gate.double()) * up.double()


@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (3, 37), (16, 2048), (100, 513), (0, 8)])
def test_multiplies_up_by_silu_of_gate(backend, device, dtype, assert_close, num_rows, size):
    gate, up = make_silu_mul_inputs(num_rows, size, dtype, device)
    actual = backend.silu_mul(gate, up)
    assert actual.is_contiguous()
    assert_close(actual, expected_output(gate, up))


def test_multiplies_by_silu_of_gates_in_the_whole_range_of_exp(backend, device, assert_close):
    gate = torch.linspace(-100, 100, 100_003, device=device)[None]
    assert_close(backend.silu_mul(gate, torch.ones_like(gate)), expected_output(gate, torch.ones_like(gate)))


def test_the_tolerance_catches_gelu(backend, device, assert_close):
    gate, up = make_silu_mul_inputs(4, 64, torch.float16, device)
    wrong = torch.nn.functional.gelu(gate.double()) * up.double()
    with pytest.raises(AssertionError):
        assert_close(backend.silu_mul(gate, up), wrong)


def test_refuses_an_up_of_another_shape_or_dtype_than_gate(backend, device):
    gate, up = make_silu_mul_inputs(4, 64, device=device)
    with pytest.raises(ValueError, match="up is"):
        backend.silu_mul(gate, up[:, :-1])
    with pytest.raises(ValueError, match=r"up\.dtype"):
        backend.silu_mul(gate, up.half())
