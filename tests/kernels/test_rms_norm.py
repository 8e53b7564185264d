import pytest
import torch
from loraserve_kernels.rms_norm import make_rms_norm_inputs


@pytest.mark.parametrize(
    "shape", [(1, 1), (5, 63), (3, 768), (400, 300), (0, 16), (7, 3, 40), (2, 3, 5, 17), (33,), (2, 16_384)]
)
def test_normalizes_the_last_dimension(backend, device, dtype, assert_close, shape):
    x, weight = make_rms_norm_inputs(shape, dtype, device)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    actual = backend.rms_norm(x, weight, 1e-5)
    assert actual.is_contiguous()
    assert_close(actual, expected)


def test_normalizes_heads_of_a_fused_output(backend, device, assert_close):
    fused = torch.randn(6, 5 * 32, generator=torch.Generator().manual_seed(0)).to(device)
    x = fused[:, 32:128].unflatten(1, (3, 32))
    weight = torch.ones(32, device=device)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert_close(backend.rms_norm(x, weight, 1e-6), expected)


def test_the_tolerance_catches_a_wrong_epsilon(backend, device, assert_close):
    x, weight = make_rms_norm_inputs((4, 64), device=device)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-2).sqrt() * weight.double()
    with pytest.raises(AssertionError):
        assert_close(backend.rms_norm(x, weight, 1e-5), expected)


def test_refuses_a_weight_of_another_shape_or_dtype(backend, device):
    x, weight = make_rms_norm_inputs((4, 64), device=device)
    with pytest.raises(ValueError, match="weight is"):
        backend.rms_norm(x, weight[:-1], 1e-5)
    with pytest.raises(ValueError, match=r"weight\.dtype"):
        backend.rms_norm(x, weight.half(), 1e-5)
