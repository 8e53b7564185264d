import pytest
import torch
from loraserve_kernels.rms_norm import make_rms_norm_inputs


@pytest.mark.parametrize("shape", [(1, 1), (5, 63), (3, 768), (0, 16)])
def test_matches_the_separate_sum_and_norm_bit_for_bit(backend, device, dtype, shape):
    x, weight = make_rms_norm_inputs(shape, dtype, device)
    residual, _ = make_rms_norm_inputs(shape, dtype, device, seed=1)
    before = x.clone(), residual.clone()
    total, normed = backend.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, backend.rms_norm(x + residual, weight, 1e-5))
    assert total.is_contiguous()
    assert normed.is_contiguous()
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def test_refuses_a_residual_of_another_shape_or_dtype(backend, device):
    x, weight = make_rms_norm_inputs((4, 64), device=device)
    with pytest.raises(ValueError, match="residual is"):
        backend.add_rms_norm(x, x[:-1], weight, 1e-5)
    with pytest.raises(ValueError, match=r"residual\.dtype"):
        backend.add_rms_norm(x, x.half(), weight, 1e-5)
