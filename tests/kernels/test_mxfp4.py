"""Weights in MXFP4, as checkpoints have them: whole, bit for bit what transformers makes of them."""

import pytest
import torch
from loraserve_kernels.cpu_backend import CpuBackend
from loraserve_kernels.cpu_library import CpuLibrary
from loraserve_kernels.mxfp4 import whole_mxfp4
from loraserve_kernels.packed_linear import PackedLinear
from loraserve_kernels.quantization import Quantization
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

DTYPES = [torch.float32, torch.bfloat16]
SCALES = 2, 252
"""Of which elements are neither below the normal range nor infinite."""


def make_blocks(*shape: int) -> tuple[Tensor, Tensor]:
    """All elements and scales that there are."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator).to(torch.uint8)
    return blocks, torch.randint(SCALES[0], SCALES[1] + 1, shape, generator=generator).to(torch.uint8)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (4, 50, 9), (2, 5, 3)], ids=str)
def test_it_is_what_transformers_makes_of_it(
    any_library: CpuLibrary, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    blocks, scales = make_blocks(*shape)
    if dtype == torch.float16:
        scales = scales // 32 + 120
    in_three = blocks.view(-1, *blocks.shape[-3:]), scales.view(-1, *scales.shape[-2:])
    expected = convert_moe_packed_tensors(*in_three, dtype=torch.float32).mT.reshape(*shape[:-1], -1).to(dtype)
    for make_whole in (whole_mxfp4, CpuBackend(any_library).whole_mxfp4):
        out = torch.full(expected.shape, torch.nan, dtype=dtype)
        assert make_whole(blocks, scales, out) is out
        assert torch.equal(out, expected)


def test_pieces_are_made_whole_as_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, scales = make_blocks(30, 7)
    whole = whole_mxfp4(blocks, scales, torch.empty(30, 224))
    monkeypatch.setattr("loraserve_kernels.mxfp4._PIECE", 11)
    assert torch.equal(whole_mxfp4(blocks, scales, torch.empty(30, 224)), whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_it_is_what_it_was(any_library: CpuLibrary, dtype: torch.dtype) -> None:
    """But for weights below 2^-121, which are zeros then."""
    blocks, scales = make_blocks(90, 7)
    whole = whole_mxfp4(blocks, scales.clamp_min(10), torch.empty(90, 224, dtype=dtype))
    packed = PackedLinear(whole, None, any_library, Quantization.MXFP4)
    assert torch.equal(packed.rows(torch.arange(90)), whole)


@pytest.mark.parametrize(
    ("blocks", "scales", "out", "name"),
    [
        (torch.zeros(2, 3, 15, dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.uint8), torch.empty(2, 96), "blocks"),
        (torch.zeros(2, 3, 16), torch.zeros(2, 3, dtype=torch.uint8), torch.empty(2, 96), "blocks"),
        (torch.zeros(2, 3, 16, dtype=torch.uint8), torch.zeros(2, 4, dtype=torch.uint8), torch.empty(2, 96), "scales"),
        (torch.zeros(2, 3, 16, dtype=torch.uint8), torch.zeros(2, 3), torch.empty(2, 96), "scales"),
        (torch.zeros(2, 3, 16, dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.uint8), torch.empty(2, 95), "out"),
        (torch.zeros(2, 3, 16, dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.uint8), torch.empty(96, 2).T, "out"),
    ],
)
def test_what_is_no_mxfp4_is_refused(
    cpu_library: CpuLibrary, blocks: Tensor, scales: Tensor, out: Tensor, name: str
) -> None:
    for make_whole in (whole_mxfp4, CpuBackend(cpu_library).whole_mxfp4):
        with pytest.raises(ValueError, match=f"^{name} is"):
            make_whole(blocks, scales, out)
