"""Rows of the weight of each kind of linear: embeddings read them, and trained token rows are compared with them."""

import pytest
import torch
from loraserve_kernels.backend import Backend
from loraserve_kernels.cpu_backend import CpuBackend
from loraserve_kernels.linear import Linear
from loraserve_kernels.quantization import Quantization
from loraserve_kernels.reference_backend import ReferenceBackend
from torch import Tensor

from tests.kernels.four_bits import MULTIPLES, in_other_order, make_four_bits

NUM_OUTPUTS, DEPTH = 70, 256
INDICES = torch.tensor([[0, 69, 3], [17, 3, 32]])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def multiplied(linear: Linear, dtype: torch.dtype, device: str) -> Tensor:
    """The weight, recovered as a product with the unit matrix: [NUM_OUTPUTS, DEPTH]."""
    return linear(torch.eye(DEPTH, dtype=dtype, device=device)).T


@pytest.mark.parametrize(
    ("keep_weight", "quantization"),
    [(True, None), (False, None), (False, Quantization.INT8), (False, Quantization.INT4)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_those_of_the_multiplied_weight(
    backend: Backend, device: str, dtype: torch.dtype, keep_weight: bool, quantization: Quantization | None
) -> None:
    weight = torch.randn(NUM_OUTPUTS, DEPTH, dtype=dtype, device=device)
    linear = backend.linear(weight.clone(), None, keep_weight=keep_weight, quantization=quantization)
    expected = weight if quantization is None else backend.rounded_weight(weight, quantization)
    rows = linear.rows(INDICES.to(device))
    assert torch.equal(rows, expected[INDICES.to(device)])
    assert torch.equal(rows, multiplied(linear, dtype, device)[INDICES.to(device)])


@pytest.mark.parametrize("is_reordered", [False, True])
@pytest.mark.parametrize("form", MULTIPLES)
@pytest.mark.parametrize("has_library", [False, True])
def test_rows_of_a_four_bit_weight_are_those_of_the_multiplied_weight(
    cpu: CpuBackend, has_library: bool, form: Quantization, is_reordered: bool
) -> None:
    backend = cpu if has_library else ReferenceBackend()
    weight = make_four_bits(form, (NUM_OUTPUTS, DEPTH))
    if is_reordered:
        weight = in_other_order(weight)
    for dtype in (torch.float32, torch.bfloat16):
        linear = backend.four_bit_linear(weight, None, dtype)
        expected = backend.dequantize_weight(weight, torch.empty(NUM_OUTPUTS, DEPTH, dtype=dtype))
        assert torch.equal(linear.rows(INDICES), expected[INDICES])
        assert torch.equal(linear.rows(INDICES), multiplied(linear, dtype, "cpu")[INDICES])
