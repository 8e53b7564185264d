"""How far an op may be from the float64 computation of the same inputs: one tolerance per dtype."""

import torch
from torch import Tensor

TOLERANCES = {
    # (relative, absolute): one rounding of the result, plus float32 sums of up to a few thousand terms of size 1.
    torch.float32: (2e-5, 2e-5),
    torch.bfloat16: (2**-8, 2e-3),
    torch.float16: (2**-10, 5e-4),
}


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Compare with a float64 result; a NaN anywhere fails."""
    relative, absolute = TOLERANCES[actual.dtype]
    assert expected.dtype == torch.float64
    torch.testing.assert_close(actual.double(), expected, rtol=relative, atol=absolute)
