"""Weights in eight bits: products are bit for bit those of their multiples packed.

The multiples are rounded to bfloat16 where the CPU multiplies that. Where it multiplies int16, rows in bfloat16 are
rounded to that, and elsewhere multiplied in float32.
"""

import pytest
import torch
from loraserve_kernels.cpu_backend import CpuBackend
from loraserve_kernels.cpu_library import CpuLibrary
from loraserve_kernels.int8_weight import MAX_MULTIPLE, Int8Linear, rounded_to_int8
from loraserve_kernels.packed_linear import PackedLinear
from torch import Tensor

from tests.kernels.conftest import amx_set

SHAPES = [(1, 1), (7, 5), (33, 100), (80, 40), (64, 32), (200, 1100), (768, 2048)]
NUM_ROWS = [0, *range(1, 20), 31, 33, 64, 330, 700]
DTYPES = [torch.float32, torch.bfloat16]


def multiples_of(weight: Tensor) -> Tensor:
    """As `rounded_to_int8` has them, but in float32."""
    scale = weight.float().abs().amax(-1, keepdim=True) / MAX_MULTIPLE
    return torch.where(scale > 0, weight.float() / scale, 0.0).round() * scale


def make_weight(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Outputs of very different sizes, one of them all zeros."""
    generator = torch.Generator().manual_seed(0)
    size = torch.exp2(torch.randint(-20, 20, (shape[0], 1), generator=generator))
    weight = torch.randn(*shape, generator=generator) * size
    weight[shape[0] // 2] = 0
    return weight.to(dtype), torch.randn(shape[0], generator=generator).to(dtype)


def rounds_weights(library: CpuLibrary) -> bool:
    """Whether multiples are rounded to bfloat16: 126 / 127 times 127 is 126.008 then, and else 126."""
    weight, x = torch.tensor([[1.0, 126 / 127]]).bfloat16(), torch.tensor([[-126.0, 127.0]]).bfloat16()
    return bool(PackedLinear(weight, None, library, int8=True)(x) > 0.005)


def rounds_rows(library: CpuLibrary) -> bool:
    """Whether rows of bfloat16 are rounded to int16: beside 1, 2^-16 is a quarter of a multiple."""
    weight, x = torch.tensor([[0.0, 1.0]]).bfloat16(), torch.tensor([[1.0, 2**-16]]).bfloat16()
    return not PackedLinear(weight, None, library, int8=True)(x).any()


def products_in_int16(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x: bfloat16. Of each 128 of the depth integers are multiplied; their sum is added to those before."""
    weight_scale = weight.float().abs().amax(-1) / MAX_MULTIPLE
    multiples = torch.where(weight_scale[:, None] > 0, weight.float() / weight_scale[:, None], 0.0).round()
    total = torch.zeros(x.shape[0], weight.shape[0])
    for part, factors in zip(x.float().split(128, -1), multiples.split(128, -1), strict=True):
        exponent = torch.frexp(part.abs().amax(-1, keepdim=True)).exponent
        scale = torch.exp2((exponent - 15).clamp_min(-126).double())
        integers = (part.double() / scale).round() @ factors.double().T
        scales = (scale * weight_scale.double()).float()
        total = (integers.float().double() * scales.double() + total.double()).float()
    return (total if bias is None else total + bias.float()).bfloat16()


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("packed_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_of_the_rounded_weight(
    any_library: CpuLibrary, shape: tuple[int, int], packed_dtype: torch.dtype, with_bias: bool
) -> None:
    weight, bias = make_weight(shape, packed_dtype)
    added = bias if with_bias else None
    int8 = PackedLinear(weight, added, any_library, int8=True)
    x = torch.randn(max(NUM_ROWS), shape[1], generator=torch.Generator().manual_seed(1)).to(packed_dtype)
    whole = int8(x)
    if packed_dtype == torch.bfloat16 and rounds_rows(any_library):
        expected = products_in_int16(x, weight, added)
    elif rounds_weights(any_library):
        expected = PackedLinear(rounded_to_int8(weight), added, any_library)(x)
    else:
        wide = PackedLinear(multiples_of(weight), None if added is None else added.float(), any_library)
        expected = wide(x.float()).to(packed_dtype)
    assert torch.equal(whole, expected)
    for num_rows in NUM_ROWS:
        assert torch.equal(int8(x[:num_rows]), whole[:num_rows]), num_rows


@pytest.fixture(params=["avx512", "avx512_vnni", "avx_vnni", "narrowest"])
def int16_library(request: pytest.FixtureRequest) -> CpuLibrary:
    """One that rounds rows of bfloat16."""
    library: CpuLibrary = request.getfixturevalue(f"{request.param}_library")
    if not rounds_rows(library):
        pytest.skip("for x86")
    return library


@pytest.mark.parametrize("size", [1.0, 2.0**-100, 2.0**-126, 2.0**110, 2.0**127])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_are_rounded_to_int16(int16_library: CpuLibrary, shape: tuple[int, int], size: float) -> None:
    """Elements of very different sizes, groups of nothing but zeros."""
    generator = torch.Generator().manual_seed(2)
    weight = (torch.randn(shape, generator=generator) * 2**-20).bfloat16()
    bias = torch.randn(shape[0], generator=generator).bfloat16()
    exponents = torch.randint(-24, 0, (21, shape[1]), generator=generator)
    x = (torch.randn(21, shape[1], generator=generator).clamp(-1, 1) * torch.exp2(exponents) * size).bfloat16()
    x[3, :200] = 0
    x[4] = 0
    linear = PackedLinear(weight, bias, int16_library, int8=True)
    assert torch.equal(linear(x), products_in_int16(x, weight, bias))


def test_elements_within_a_128th_of_the_largest_are_not_rounded(int16_library: CpuLibrary) -> None:
    """Nor are sums of their products, where the weights are their multiples."""
    generator = torch.Generator().manual_seed(4)
    weight = torch.randint(-127, 128, (40, 300), generator=generator).bfloat16()
    weight[:, ::100] = 127
    x = (torch.randint(128, 256, (9, 300), generator=generator) * 2.0 ** torch.randint(0, 8, (9, 300))).bfloat16()
    x *= torch.randint(0, 2, x.shape, generator=generator) * 2 - 1
    x[:, ::128] = 2.0**14
    expected = (x.double() @ weight.double().T).bfloat16()
    assert torch.equal(PackedLinear(weight, None, int16_library, int8=True)(x), expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_seen_in_its_row_alone(any_library: CpuLibrary, value: float) -> None:
    weight = torch.randn(40, 300, generator=torch.Generator().manual_seed(5)).bfloat16()
    linear, x = PackedLinear(weight, None, any_library, int8=True), torch.randn(9, 300).bfloat16()
    others = [row for row in range(9) if row != 3]
    expected = linear(x)[others]
    x[3, 250] = value
    result = linear(x)
    assert not result[3].isfinite().any()
    assert torch.equal(result[others], expected)


@pytest.mark.parametrize("packed_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_are_those_of_the_rounded_weight(
    any_library: CpuLibrary, shape: tuple[int, int], packed_dtype: torch.dtype
) -> None:
    weight, _ = make_weight(shape, packed_dtype)
    linear = PackedLinear(weight, None, any_library, int8=True)
    indices = torch.arange(shape[0]).flip(0)
    assert torch.equal(linear.rows(indices), rounded_to_int8(weight)[indices])


def test_weights_below_the_normal_range_keep_their_sign(any_library: CpuLibrary) -> None:
    """Of a scale that is not normal a weight may be more than 127 multiples, which are all there are."""
    weight = torch.arange(1, 4000, dtype=torch.int32)[:, None].view(torch.float32).repeat(1, 2)
    rounded = rounded_to_int8(weight)
    assert torch.equal(PackedLinear(weight, None, any_library, int8=True).rows(torch.arange(3999)), rounded)
    assert torch.equal(Int8Linear(weight, None)(torch.tensor([1.0, 0.0])), rounded[:, 0])
    assert (rounded >= 0).all()


@pytest.mark.parametrize("packed_dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (3, 50, 400)], ids=str)
def test_a_backend_rounds_as_torch_does(
    any_library: CpuLibrary, shape: tuple[int, ...], packed_dtype: torch.dtype
) -> None:
    weight = make_weight((shape[-2], shape[-1]), torch.float32)[0].mul(2**-8).expand(shape).to(packed_dtype)
    for some in (weight, weight.mT):
        assert torch.equal(CpuBackend(any_library).rounded_to_int8(some), rounded_to_int8(some))


@pytest.mark.parametrize("packed_dtype", [*DTYPES, torch.float16], ids=str)
def test_a_backend_rounds_into_what_it_is_given(any_library: CpuLibrary, packed_dtype: torch.dtype) -> None:
    weight = make_weight((33, 100), torch.float32)[0].mul(2**-8).to(packed_dtype)
    out = torch.full_like(weight, torch.nan)
    assert CpuBackend(any_library).rounded_to_int8(weight, out) is out
    assert torch.equal(out, rounded_to_int8(weight))


@pytest.mark.parametrize(
    "out",
    [torch.empty(33, 99), torch.empty(100, 33).T, torch.empty(33, 100).bfloat16()],
    ids=["shape", "dense", "dtype"],
)
def test_it_does_not_round_into_something_else(cpu_library: CpuLibrary, out: Tensor) -> None:
    weight, _ = make_weight((33, 100), torch.float32)
    for round_weight in (CpuBackend(cpu_library).rounded_to_int8, rounded_to_int8):
        with pytest.raises(ValueError, match=r"^out"):
            round_weight(weight, out)


@pytest.mark.parametrize("num_rows", [1, 8, 16, 21, 40])
@pytest.mark.parametrize("shape", [(33, 100), (80, 64)])
def test_what_lies_around_the_rows_is_not_seen(any_library: CpuLibrary, shape: tuple[int, int], num_rows: int) -> None:
    weight, bias = make_weight(shape, torch.bfloat16)
    linear = PackedLinear(weight, bias, any_library, int8=True)
    around = torch.full((num_rows + 32, shape[1] + 64), torch.nan, dtype=torch.bfloat16)
    x = around[16 : num_rows + 16, 32 : shape[1] + 32]
    x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(3)))
    assert torch.equal(linear(x), linear(x.clone()))


def test_amx_turned_off_gives_the_same_within_rounding(amx_library: CpuLibrary, assert_close) -> None:
    weight, _ = make_weight((64, 320), torch.bfloat16)
    linear, x = PackedLinear(weight, None, amx_library, int8=True), torch.randn(20, 320).bfloat16()
    expected = x.double() @ rounded_to_int8(weight).double().T
    assert_close(linear(x), expected)
    with amx_set(amx_library, enabled=False):
        assert_close(linear(x), expected)


@pytest.mark.parametrize(("packed_dtype", "size"), [(torch.bfloat16, 0.51), (torch.float32, 0.26)], ids=str)
def test_a_weight_takes_a_byte(cpu_library: CpuLibrary, packed_dtype: torch.dtype, size: float) -> None:
    weight, _ = make_weight((256, 512), packed_dtype)
    assert weight.numel() <= PackedLinear(weight, None, cpu_library, int8=True).weight.numel() < size * weight.nbytes


@pytest.mark.parametrize("packed_dtype", [*DTYPES, torch.float16], ids=str)
def test_rounding_moves_no_weight_by_more_than_half_a_multiple(packed_dtype: torch.dtype) -> None:
    weight = torch.randn(3, 50, 400, generator=torch.Generator().manual_seed(2)).to(packed_dtype)
    rounded = rounded_to_int8(weight)
    scale = weight.abs().amax(-1, keepdim=True).double() / MAX_MULTIPLE
    moved = (rounded.double() - weight.double()).abs()
    assert (moved <= scale / 2 + rounded.double().abs() * torch.finfo(packed_dtype).eps).all()
    assert moved.max() > scale.min() / 3
    assert max(row.unique().numel() for row in rounded.flatten(0, 1)) <= 2 * MAX_MULTIPLE + 1


@pytest.mark.parametrize("packed_dtype", DTYPES, ids=str)
def test_rounding_twice_is_rounding_once(packed_dtype: torch.dtype) -> None:
    rounded = rounded_to_int8(make_weight((200, 1100), packed_dtype)[0])
    assert torch.equal(rounded_to_int8(rounded), rounded)


def test_pieces_are_rounded_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = make_weight((37, 100), torch.float32)[0].view(37, 4, 25).transpose(0, 1)
    whole = rounded_to_int8(weight)
    monkeypatch.setattr("loraserve_kernels.int8_weight._PIECE", 60)
    assert torch.equal(rounded_to_int8(weight), whole)
    assert torch.equal(torch.stack([rounded_to_int8(part) for part in weight]), whole)


@pytest.mark.parametrize("plain_dtype", [*DTYPES, torch.float16], ids=str)
def test_the_plain_linear_is_that_of_the_rounded_weight(plain_dtype: torch.dtype) -> None:
    weight, bias = torch.randn(33, 100).to(plain_dtype), torch.randn(33).to(plain_dtype)
    linear, x = Int8Linear(weight, bias), torch.randn(2, 5, 100).to(plain_dtype)
    assert torch.equal(linear(x), torch.nn.functional.linear(x, rounded_to_int8(weight), bias))
    with pytest.raises(ValueError, match="x is"):
        linear(x[..., :99])
