"""Weights in NF4, as bitsandbytes has them: made whole, and packed."""

import pytest
import torch
from loraserve_kernels.cpu_backend import CpuBackend
from loraserve_kernels.cpu_library import CpuLibrary
from loraserve_kernels.nf4 import LEVELS, PACKED_LEVELS, whole_nf4
from loraserve_kernels.quantization import Quantization
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_codes(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (*shape, 32), generator=generator).to(torch.uint8)
    return codes, torch.rand(shape, generator=generator) * 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (4, 50, 9), (2, 5, 3)], ids=str)
def test_each_code_is_a_level_of_the_largest_of_its_block(
    any_library: CpuLibrary, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    codes, largest = make_codes(*shape)
    places = torch.stack([codes >> 4, codes & 15], -1).flatten(-2).long()
    for levels in (LEVELS, PACKED_LEVELS):
        expected = (levels[places] * largest[..., None]).flatten(-2).to(dtype)
        for make_whole in (whole_nf4, CpuBackend(any_library).whole_nf4):
            out = torch.full(expected.shape, torch.nan, dtype=dtype)
            assert make_whole(codes, largest, levels, out) is out
            assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_with_levels_as_packed_it_is_what_rounding_makes_of_it(any_library: CpuLibrary, dtype: torch.dtype) -> None:
    """Where each block has a level of 1."""
    codes, largest = make_codes(40, 5)
    codes[..., 9] |= 15
    largest = largest.to(dtype).bfloat16().float()
    whole = whole_nf4(codes, largest, LEVELS, torch.empty(40, 320, dtype=dtype))
    rounded = whole_nf4(codes, largest, PACKED_LEVELS, torch.empty(40, 320, dtype=dtype))
    assert torch.equal(CpuBackend(any_library).rounded_weight(whole, Quantization.NF4), rounded)
    assert torch.equal(CpuBackend(any_library).rounded_weight(rounded, Quantization.NF4), rounded)


def test_pieces_are_made_whole_as_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, largest = make_codes(30, 7)
    whole = whole_nf4(codes, largest, LEVELS, torch.empty(30, 448))
    monkeypatch.setattr("loraserve_kernels.nf4._PIECE", 11)
    assert torch.equal(whole_nf4(codes, largest, LEVELS, torch.empty(30, 448)), whole)


@pytest.mark.parametrize(
    ("codes", "largest", "out", "name"),
    [
        (torch.zeros(2, 3, 31, dtype=torch.uint8), torch.zeros(2, 3), torch.empty(2, 192), "codes"),
        (torch.zeros(2, 3, 32), torch.zeros(2, 3), torch.empty(2, 192), "codes"),
        (torch.zeros(2, 3, 32, dtype=torch.uint8), torch.zeros(2, 4), torch.empty(2, 192), "largest"),
        (torch.zeros(2, 3, 32, dtype=torch.uint8), torch.zeros(2, 3).double(), torch.empty(2, 192), "largest"),
        (torch.zeros(2, 3, 32, dtype=torch.uint8), torch.zeros(2, 3), torch.empty(2, 191), "out"),
        (torch.zeros(2, 3, 32, dtype=torch.uint8), torch.zeros(2, 3), torch.empty(192, 2).T, "out"),
    ],
)
def test_what_is_no_nf4_is_refused(
    cpu_library: CpuLibrary, codes: Tensor, largest: Tensor, out: Tensor, name: str
) -> None:
    for make_whole in (whole_nf4, CpuBackend(cpu_library).whole_nf4):
        with pytest.raises(ValueError, match=f"^{name} is"):
            make_whole(codes, largest, LEVELS, out)


@pytest.mark.parametrize("levels", [LEVELS[:15], LEVELS.double(), LEVELS.repeat_interleave(2)[::2]])
def test_what_are_no_levels_is_refused(cpu_library: CpuLibrary, levels: Tensor) -> None:
    codes, largest = make_codes(2, 3)
    for make_whole in (whole_nf4, CpuBackend(cpu_library).whole_nf4):
        with pytest.raises(ValueError, match=r"^levels is"):
            make_whole(codes, largest, levels, torch.empty(2, 192))
