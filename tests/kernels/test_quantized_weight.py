"""Quantized weights: products match, bit for bit, those of their packed multiples.

If the CPU multiplies int16, bfloat16 rows are rounded to int16; otherwise weights are multiplied in float32.
"""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from loraserve_kernels.cpu_backend import CpuBackend
from loraserve_kernels.cpu_library import CpuLibrary
from loraserve_kernels.four_bit_weight import FourBitWeight
from loraserve_kernels.packed_linear import PackedLinear
from loraserve_kernels.quantization import GROUP, ROUNDINGS, STORED, Quantization
from loraserve_kernels.quantized_weight import MAX_INT8, QuantizedLinear, multiples_of, rounded_weight
from torch import Tensor

from tests.kernels.conftest import amx_set
from tests.kernels.four_bits import make_four_bits, multiples_and_scales, one_output

SHAPES = [(1, 1), (7, 5), (33, 100), (80, 40), (64, 32), (200, 1100), (768, 2048)]
NUM_ROWS = [0, *range(1, 20), 31, 33, 64, 330, 700]
FEW_ROWS = [1, 5, 17]
"""Enough without a bias: a product is computed the same way before its bias is added."""
DTYPES = [torch.float32, torch.bfloat16]
FORMS = [*Quantization]
INT8, INT4, MXFP4, NF4, UINT4, UINT4_G128 = FORMS
ROUNDINGS_OF_SHAPES = [(form, shape) for form in ROUNDINGS for shape in SHAPES]
FORMS_OF_SHAPES = [
    *ROUNDINGS_OF_SHAPES,
    *((form, shape) for form in STORED[:-1] for shape in [(7, 32), (80, 64), (200, 1120)]),  # whole groups only
    *((UINT4_G128, shape) for shape in [(7, 128), (80, 256), (200, 1152)]),
]


@pytest.fixture(autouse=True)
def _torch_has_one_thread() -> Iterator[None]:
    """With more, torch's small operations wait long for cores that other pytest workers use. C functions take two."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
        yield
        torch.set_num_threads(num_threads)


def make_weight(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Outputs of very different sizes, one of them all zeros."""
    generator = torch.Generator().manual_seed(0)
    size = torch.exp2(torch.randint(-20, 20, (shape[0], 1), generator=generator))
    weight = torch.randn(*shape, generator=generator) * size
    weight[shape[0] // 2] = 0
    return weight.to(dtype)


def make_bias(size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(10)).to(dtype)


class Case(NamedTuple):
    """A weight that packing rounds, or one stored in four bits."""

    source: Tensor | FourBitWeight
    form: Quantization
    multiples: Tensor
    """float32 [N, groups, group size]."""
    scales: Tensor
    """float32 [N, groups, 1]."""

    def linear(self, bias: Tensor | None, library: CpuLibrary, dtype: torch.dtype = torch.bfloat16) -> PackedLinear:
        if isinstance(self.source, FourBitWeight):
            return PackedLinear(self.source, bias, library, dtype=dtype)
        return PackedLinear(self.source, bias, library, self.form)

    def whole(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return (self.multiples * self.scales).flatten(1)[:, : self.source.shape[1]].to(dtype)


def case_of(weight: Tensor, form: Quantization) -> Case:
    return Case(weight, form, *multiples_of(weight, form))


def make_case(form: Quantization, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16, size: float = 1) -> Case:
    if form in ROUNDINGS:
        return case_of(make_weight(shape, dtype) * size, form)
    weight = make_four_bits(form, shape, size)
    return Case(weight, form, *multiples_and_scales(weight))


def rounds_rows(library: CpuLibrary, form: Quantization) -> bool:
    """Whether bfloat16 rows are rounded to int16: then 2^-16 in a row with 1 is a quarter of a step, and becomes 0."""
    x = torch.tensor([[1.0, 2**-16]]).bfloat16()
    if form in ROUNDINGS:
        return not PackedLinear(torch.tensor([[0.0, 1.0]]).bfloat16(), None, library, form)(x).any()
    weight = one_output(form, (1.0, [0, 2048 if form is NF4 else 1]))
    x = torch.nn.functional.pad(x, (0, form.group_size(0) - 2))
    return not PackedLinear(weight, None, library, dtype=x.dtype)(x).any()


def products_in_int16(x: Tensor, case: Case, bias: Tensor | None) -> Tensor:
    """x: bfloat16; each 128 elements of a row share a scale.

    Sums of products that share their scales are exact, and are added to the total so far.
    """
    multiples, scales = case.multiples.double(), case.scales.double()
    group_size, multiples = multiples.shape[-1], multiples.flatten(1)
    total = torch.zeros(x.shape[0], len(multiples))
    for first in range(0, x.shape[1], 128):
        part = x[:, first : first + 128].double()
        exponent = torch.frexp(part.abs().amax(-1, keepdim=True)).exponent
        row_scale = torch.exp2((exponent - 15).clamp_min(-126).double())
        integers = (part / row_scale).round().split(min(group_size, 128), -1)
        for i, group in enumerate(integers, start=first // min(group_size, 128)):
            start = i * min(group_size, 128)
            sums = (group @ multiples[:, start : start + group.shape[1]].T).float().double()
            scale = (row_scale * scales[:, start // group_size].T).float().double()
            total = (sums * scale + total.double()).float()
    return (total if bias is None else total + bias.float()).bfloat16()


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("packed_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("quantization", "shape"), FORMS_OF_SHAPES, ids=str)
def test_products_equal_those_of_the_rounded_weight(
    any_library: CpuLibrary,
    quantization: Quantization,
    shape: tuple[int, int],
    packed_dtype: torch.dtype,
    with_bias: bool,
) -> None:
    case = make_case(quantization, shape, packed_dtype)
    added = make_bias(shape[0], packed_dtype) if with_bias else None
    linear = case.linear(added, any_library, packed_dtype)
    x = torch.randn(max(NUM_ROWS), shape[1], generator=torch.Generator().manual_seed(1)).to(packed_dtype)
    whole = linear(x)
    if packed_dtype == torch.bfloat16 and rounds_rows(any_library, quantization):
        expected = products_in_int16(x, case, added)
    elif quantization in (INT4, MXFP4):
        expected = PackedLinear(case.whole(packed_dtype), added, any_library)(x)
    else:
        wide = PackedLinear(case.whole(torch.float32), None if added is None else added.float(), any_library)
        expected = wide(x.float()).to(packed_dtype)
    assert torch.equal(whole, expected)
    for num_rows in NUM_ROWS if with_bias else FEW_ROWS:
        assert torch.equal(linear(x[:num_rows]), whole[:num_rows]), num_rows


@pytest.fixture(params=["avx512", "avx512_vnni", "avx_vnni", "narrowest"])
def int16_library(request: pytest.FixtureRequest) -> CpuLibrary:
    """A library that rounds bfloat16 rows."""
    library: CpuLibrary = request.getfixturevalue(f"{request.param}_library")
    if not rounds_rows(library, INT8):
        pytest.skip("for x86")
    return library


@pytest.mark.parametrize("size", [1.0, 2.0**-100, 2.0**-126, 2.0**110, 2.0**127])
@pytest.mark.parametrize(("quantization", "shape"), FORMS_OF_SHAPES, ids=str)
def test_rows_are_rounded_to_int16(
    int16_library: CpuLibrary, quantization: Quantization, shape: tuple[int, int], size: float
) -> None:
    """Elements of very different sizes, and groups of only zeros."""
    generator = torch.Generator().manual_seed(2)
    case = make_case(quantization, shape, size=2**-50)
    bias = torch.randn(shape[0], generator=generator).bfloat16()
    exponents = torch.randint(-24, 0, (21, shape[1]), generator=generator)
    x = (torch.randn(21, shape[1], generator=generator).clamp(-1, 1) * torch.exp2(exponents) * size).bfloat16()
    x[3, :200] = 0
    x[4] = 0
    assert torch.equal(case.linear(bias, int16_library)(x), products_in_int16(x, case, bias))


def test_elements_within_a_128th_of_the_largest_are_not_rounded(int16_library: CpuLibrary) -> None:
    """Nor are sums of their products if the weights equal their multiples."""
    generator = torch.Generator().manual_seed(4)
    weight = torch.randint(-127, 128, (40, 300), generator=generator).bfloat16()
    weight[:, ::100] = 127
    x = (torch.randint(128, 256, (9, 300), generator=generator) * 2.0 ** torch.randint(0, 8, (9, 300))).bfloat16()
    x *= torch.randint(0, 2, x.shape, generator=generator) * 2 - 1
    x[:, ::128] = 2.0**14
    expected = (x.double() @ weight.double().T).bfloat16()
    assert torch.equal(PackedLinear(weight, None, int16_library, INT8)(x), expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("quantization", FORMS)
def test_a_value_that_is_not_finite_affects_only_its_own_row(
    any_library: CpuLibrary, quantization: Quantization, value: float
) -> None:
    linear, x = make_case(quantization, (40, 384)).linear(None, any_library), torch.randn(9, 384).bfloat16()
    others = [row for row in range(9) if row != 3]
    expected = linear(x)[others]
    x[3, 250] = value
    result = linear(x)
    assert not result[3, result[0] != 0].isfinite().any()
    assert torch.equal(result[others], expected)


@pytest.mark.parametrize("packed_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("quantization", "shape"), FORMS_OF_SHAPES, ids=str)
def test_rows_equal_those_of_the_rounded_weight(
    any_library: CpuLibrary, quantization: Quantization, shape: tuple[int, int], packed_dtype: torch.dtype
) -> None:
    case = make_case(quantization, shape, packed_dtype)
    indices = torch.arange(shape[0]).flip(0)
    rows = case.linear(None, any_library, packed_dtype).rows(indices)
    assert torch.equal(rows, case.whole(packed_dtype)[indices])


@pytest.mark.parametrize("quantization", ROUNDINGS)
def test_subnormal_weights_keep_their_sign(any_library: CpuLibrary, quantization: Quantization) -> None:
    """A weight may be more than 127 times a subnormal scale, but 127 is the largest multiple."""
    weight = torch.arange(1, 4000, dtype=torch.int32)[:, None].view(torch.float32).repeat(1, 2)
    rounded = rounded_weight(weight, quantization)
    assert torch.equal(PackedLinear(weight, None, any_library, quantization).rows(torch.arange(3999)), rounded)
    assert torch.equal(QuantizedLinear(weight, None, quantization)(torch.tensor([1.0, 0.0])), rounded[:, 0])
    assert (rounded >= 0).all()


@pytest.mark.parametrize("packed_dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("quantization", "shape"), [*ROUNDINGS_OF_SHAPES, *((form, (3, 50, 400)) for form in ROUNDINGS)], ids=str
)
def test_a_backend_rounds_like_torch(
    any_library: CpuLibrary, quantization: Quantization, shape: tuple[int, ...], packed_dtype: torch.dtype
) -> None:
    weight = make_weight((shape[-2], shape[-1]), torch.float32).mul(2**-8).expand(shape).to(packed_dtype)
    for some in (weight, weight.mT):
        rounded = CpuBackend(any_library).rounded_weight(some, quantization)
        assert torch.equal(rounded, rounded_weight(some, quantization))


@pytest.mark.parametrize("size", [2.0**-140, 2.0**-120, 2.0**-60, 1.0, 2.0**60, 2.0**120, 2.0**126])
def test_a_backend_rounds_weights_of_any_size_to_four_bits_like_torch(any_library: CpuLibrary, size: float) -> None:
    """At normal sizes, as precisely as weights of size 1."""
    weight = torch.randn(50, 320, generator=torch.Generator().manual_seed(6)).clamp_(-1.9, 1.9)
    rounded = rounded_weight(weight * size, INT4)
    assert torch.equal(CpuBackend(any_library).rounded_weight(weight * size, INT4), rounded)
    if size >= 2.0**-120:
        assert torch.equal(rounded, rounded_weight(weight, INT4) * size)


@pytest.mark.parametrize("packed_dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("quantization", ROUNDINGS)
def test_a_backend_rounds_into_the_given_output(
    any_library: CpuLibrary, quantization: Quantization, packed_dtype: torch.dtype
) -> None:
    weight = make_weight((33, 100), torch.float32).mul(2**-8).to(packed_dtype)
    out = torch.full_like(weight, torch.nan)
    assert CpuBackend(any_library).rounded_weight(weight, quantization, out) is out
    assert torch.equal(out, rounded_weight(weight, quantization))


@pytest.mark.parametrize(
    "out",
    [torch.empty(33, 99), torch.empty(100, 33).T, torch.empty(33, 100).bfloat16()],
    ids=["shape", "dense", "dtype"],
)
def test_rounding_into_an_output_that_does_not_fit_is_refused(cpu_library: CpuLibrary, out: Tensor) -> None:
    weight = make_weight((33, 100), torch.float32)
    for round_weight in (CpuBackend(cpu_library).rounded_weight, rounded_weight):
        with pytest.raises(ValueError, match=r"^out"):
            round_weight(weight, INT8, out)


@pytest.mark.parametrize("num_rows", [1, 8, 16, 21, 40])
@pytest.mark.parametrize("shape", [(33, 384), (80, 128)])
@pytest.mark.parametrize("quantization", FORMS)
def test_values_around_the_rows_have_no_effect(
    any_library: CpuLibrary, quantization: Quantization, shape: tuple[int, int], num_rows: int
) -> None:
    linear = make_case(quantization, shape).linear(make_bias(shape[0], torch.bfloat16), any_library)
    around = torch.full((num_rows + 32, shape[1] + 64), torch.nan, dtype=torch.bfloat16)
    x = around[16 : num_rows + 16, 32 : shape[1] + 32]
    x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(3)))
    assert torch.equal(linear(x), linear(x.clone()))


@pytest.mark.parametrize("quantization", FORMS)
def test_products_are_the_same_with_and_without_amx(amx_library: CpuLibrary, quantization: Quantization) -> None:
    linear = make_case(quantization, (80, 1152)).linear(None, amx_library)
    rows = torch.randn(700, 1152, generator=torch.Generator().manual_seed(4)).bfloat16()
    rows[3, 500], rows[20] = torch.inf, 0
    for x in (rows[:8], rows[:9], rows[:40], rows):
        found = linear(x)
        with amx_set(amx_library, enabled=False):
            torch.testing.assert_close(linear(x), found, rtol=0, atol=0, equal_nan=True)


def test_quantized_weights_have_fewer_free_rows(amx_library: CpuLibrary) -> None:
    backend = CpuBackend(amx_library)
    assert backend.num_free_rows(torch.bfloat16) == 16
    assert {backend.num_free_rows(torch.bfloat16, form) for form in FORMS} == {4}


@pytest.mark.parametrize("packed_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("quantization", FORMS)
def test_a_packed_weight_takes_the_bytes_that_row_bytes_reports(
    cpu_library: CpuLibrary, quantization: Quantization, packed_dtype: torch.dtype
) -> None:
    linear = make_case(quantization, (256, 512), packed_dtype).linear(None, cpu_library, packed_dtype)
    assert len(linear.weight) == 256 * quantization.row_bytes(512)


@pytest.mark.parametrize("packed_dtype", [*DTYPES, torch.float16], ids=str)
def test_rounding_moves_no_weight_by_more_than_half_a_multiple(packed_dtype: torch.dtype) -> None:
    weight = torch.randn(3, 50, 400, generator=torch.Generator().manual_seed(2)).to(packed_dtype)
    rounded = rounded_weight(weight, INT8)
    scale = weight.abs().amax(-1, keepdim=True).double() / MAX_INT8
    moved = (rounded.double() - weight.double()).abs()
    assert (moved <= scale / 2 + rounded.double().abs() * torch.finfo(packed_dtype).eps).all()
    assert moved.max() > scale.min() / 3
    assert max(row.unique().numel() for row in rounded.flatten(0, 1)) <= 2 * MAX_INT8 + 1


@pytest.mark.parametrize("packed_dtype", DTYPES, ids=str)
def test_int4_weights_are_16_multiples_of_one_scale_per_32_weights(packed_dtype: torch.dtype) -> None:
    """No rounded weight needs more digits than bfloat16 has."""
    weight = torch.randn(3, 50, 416, generator=torch.Generator().manual_seed(2)).to(packed_dtype)
    rounded = rounded_weight(weight, INT4)
    assert torch.equal(rounded, rounded.bfloat16())
    multiples, scales = multiples_of(weight.flatten(0, 1), INT4)
    assert set(multiples.unique().tolist()) == set(range(-8, 8))
    assert multiples.shape == (150, 13, GROUP)
    assert torch.equal((multiples * scales).reshape(weight.shape).to(packed_dtype), rounded)


def test_the_rounding_error_of_int4_is_nearly_minimal() -> None:
    """In squares, and less than with the scale that maps the largest weight to -8."""
    groups = torch.randn(2000, GROUP, generator=torch.Generator().manual_seed(7))
    left = (rounded_weight(groups, INT4) - groups).square().sum(-1)
    most, least = groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True)
    plain = torch.where(most > -least, most, least) / -8
    tried = [plain * size for size in torch.linspace(0.6, 1.4, 161)]
    errors = [((groups / scale).round().clamp(-8, 7) * scale - groups).square().sum(-1) for scale in tried]
    assert left.sum() < 1.05 * torch.stack(errors).amin(0).sum()
    assert left.sum() < 0.92 * ((groups / plain).round().clamp(-8, 7) * plain - groups).square().sum()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("packed_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("quantization", ROUNDINGS)
def test_a_weight_that_is_not_finite_spoils_exactly_the_weights_that_share_its_scale(
    any_library: CpuLibrary, quantization: Quantization, packed_dtype: torch.dtype, value: float
) -> None:
    weight = torch.randn(40, 100, generator=torch.Generator().manual_seed(8)).to(packed_dtype)
    weight[3, 70] = value
    group = slice(None) if quantization is INT8 else slice(64, 96)
    for rounded in (rounded_weight(weight, quantization), CpuBackend(any_library).rounded_weight(weight, quantization)):
        assert not rounded[3, group].isfinite().any()
        rounded[3, group] = 0
        assert rounded.isfinite().all()


@pytest.mark.parametrize("packed_dtype", DTYPES, ids=str)
def test_rounding_to_int8_twice_equals_rounding_once(packed_dtype: torch.dtype) -> None:
    rounded = rounded_weight(make_weight((200, 1100), packed_dtype), INT8)
    assert torch.equal(rounded_weight(rounded, INT8), rounded)


@pytest.mark.parametrize("quantization", ROUNDINGS)
def test_rounding_in_pieces_equals_rounding_the_whole(
    monkeypatch: pytest.MonkeyPatch, quantization: Quantization
) -> None:
    weight = make_weight((37, 180), torch.float32).view(37, 4, 45).transpose(0, 1)
    whole = rounded_weight(weight, quantization)
    monkeypatch.setattr("loraserve_kernels.quantized_weight._PIECE", 100)
    assert torch.equal(rounded_weight(weight, quantization), whole)
    assert torch.equal(torch.stack([rounded_weight(part, quantization) for part in weight]), whole)


@pytest.mark.parametrize("plain_dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("quantization", ROUNDINGS)
def test_the_plain_linear_multiplies_by_the_rounded_weight_and_stores_it_quantized(
    plain_dtype: torch.dtype, quantization: Quantization
) -> None:
    weight, bias = torch.randn(33, 100).to(plain_dtype), torch.randn(33).to(plain_dtype)
    linear, x = QuantizedLinear(weight, bias, quantization), torch.randn(2, 5, 100).to(plain_dtype)
    assert torch.equal(linear(x), torch.nn.functional.linear(x, rounded_weight(weight, quantization), bias))
    kept = [value for value in vars(linear).values() if isinstance(value, torch.Tensor) and value is not linear.bias]
    assert sum(value.nbytes for value in kept) == 33 * quantization.row_bytes(100)
    with pytest.raises(ValueError, match="x is"):
        linear(x[..., :99])
