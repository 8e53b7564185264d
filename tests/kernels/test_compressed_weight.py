"""Weights stored in three quarters of their bytes: results have the same bits as without, whatever the weights."""

import pytest
import torch
from loraserve_kernels.cpu_calls import COMPRESSED, PLAIN
from loraserve_kernels.cpu_library import CpuLibrary
from loraserve_kernels.packed_linear import PackedLinear
from torch import Tensor

from tests.kernels.conftest import amx_set

NUM_ROWS = (1, 5, 16, 17, 32, 33, 48, 65, 330, 650)


@pytest.fixture
def library(amx_library: CpuLibrary) -> CpuLibrary:
    """Weights are compressed for AMX only."""
    return amx_library


def random_weight(num_outputs: int, depth: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(num_outputs, depth, generator=generator) * depth**-0.5).bfloat16()


def of_bits(weight: Tensor, positions: Tensor, bits: list[int]) -> Tensor:
    changed = weight.clone()
    flat = changed.view(torch.int16).view(-1)
    values = torch.tensor(bits, dtype=torch.int32).to(torch.int16)
    flat[positions] = values.repeat(len(positions) // len(bits) + 1)[: len(positions)]
    return changed


def uncompressed(weight: Tensor, bias: Tensor | None, library: CpuLibrary) -> PackedLinear:
    with amx_set(library, enabled=False):
        return PackedLinear(weight, bias, library)


def assert_same_bits(weight: Tensor, library: CpuLibrary) -> None:
    bias = torch.randn(weight.shape[0], generator=torch.Generator().manual_seed(1)).bfloat16()
    compressed, plain = PackedLinear(weight, bias, library), uncompressed(weight, bias, library)
    assert compressed.format == COMPRESSED
    assert plain.format == PLAIN
    x = torch.randn(max(NUM_ROWS), weight.shape[1], generator=torch.Generator().manual_seed(2)).bfloat16()
    for num_rows in NUM_ROWS:
        y, expected = compressed(x[:num_rows]), plain(x[:num_rows])
        assert torch.equal(y.view(torch.int16), expected.view(torch.int16)), num_rows


@pytest.mark.parametrize("shape", [(64, 32), (192, 96), (128, 100), (256, 1000), (4096, 768)], ids=str)
def test_products_match_those_of_an_uncompressed_weight_bit_for_bit(
    library: CpuLibrary, shape: tuple[int, int]
) -> None:
    assert_same_bits(random_weight(*shape), library)


def test_compression_saves_a_quarter_of_the_bytes(library: CpuLibrary) -> None:
    weight = random_weight(256, 512)
    assert (
        PackedLinear(weight, None, library).weight.numel() < 0.76 * uncompressed(weight, None, library).weight.numel()
    )


def test_weights_with_rare_exponents_give_the_same_products(library: CpuLibrary) -> None:
    """At the first and last weights; zeros, the smallest and largest numbers; many in one tile and none in others."""
    weight = random_weight(128, 640)
    generator = torch.Generator().manual_seed(3)
    scattered = torch.randint(weight.numel(), (300,), generator=generator)
    ends = torch.tensor([0, 639, weight.numel() - 640, weight.numel() - 1])
    bits = [0x0000, 0x8000, 0x0001, 0x0080, 0x7F7F, 0xFF7F, 0x3F80, 0x4780, 0x0F80]
    # Sums must stay finite, so a row has at most one of the largest numbers.
    for positions in (scattered, ends, torch.arange(17)):
        assert_same_bits(of_bits(weight, positions, [bit for bit in bits if bit & 0x7F00 != 0x7F00]), library)
    assert_same_bits(of_bits(weight, torch.arange(0, weight.numel(), 640), bits), library)


def test_infinities_and_nans_are_preserved(library: CpuLibrary) -> None:
    weight = of_bits(random_weight(64, 64), torch.tensor([5, 70]), [0x7F80, 0x7FC0])
    y = PackedLinear(weight, None, library)(torch.ones(3, 64).bfloat16())
    assert torch.isinf(y[:, 0]).all()
    assert torch.isnan(y[:, 1]).all()
    assert torch.isfinite(y[:, 2:]).all()


def test_every_weight_is_decoded_exactly(library: CpuLibrary) -> None:
    """The product with the unit matrix is the weight itself."""
    weight = of_bits(random_weight(64, 256), torch.arange(0, 64 * 256, 37), [0x0000, 0x4780, 0x0F80])
    linear = PackedLinear(weight, None, library)
    assert linear.format == COMPRESSED
    assert torch.equal(linear(torch.eye(256).bfloat16()), weight.T)


def test_rows_are_decoded_exactly(library: CpuLibrary) -> None:
    """As token embeddings are read; also weights with rare exponents, which are stored uncompressed."""
    weight = of_bits(random_weight(256, 512), torch.arange(3, 256 * 512, 997), [0x0000, 0x4780, 0x0F80])
    linear = PackedLinear(weight, None, library)
    assert linear.format == COMPRESSED
    indices = torch.tensor([191, 5, 0, 5, 64])
    assert torch.equal(linear.rows(indices), weight[indices])


def test_weights_with_arbitrary_exponents_are_not_compressed(library: CpuLibrary) -> None:
    generator = torch.Generator().manual_seed(4)
    weight = torch.randint(-(2**15), 2**15, (64, 256), generator=generator, dtype=torch.int32).to(torch.int16)
    weight = weight.view(torch.bfloat16).nan_to_num(1.0, 2.0, -2.0)
    linear = PackedLinear(weight, None, library)
    assert linear.format == PLAIN
    x = torch.eye(256).bfloat16()
    assert torch.equal(linear(x), uncompressed(weight, None, library)(x))


@pytest.mark.parametrize(("shape", "dtype"), [((48, 64), torch.bfloat16), ((64, 64), torch.float32)], ids=str)
def test_unsupported_shapes_and_dtypes_are_not_compressed(
    library: CpuLibrary, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    assert PackedLinear(random_weight(*shape).to(dtype), None, library).format == PLAIN


def test_a_compressed_weight_is_still_multiplied_after_amx_is_disabled(library: CpuLibrary) -> None:
    weight, x = random_weight(64, 64), torch.eye(64).bfloat16()
    linear = PackedLinear(weight, None, library)
    with amx_set(library, enabled=False):
        assert torch.equal(linear(x), weight.T)
