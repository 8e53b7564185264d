"""Four-bit weights as checkpoints store them: dequantized, multiplied, and refused if invalid."""

from dataclasses import replace

import pytest
import torch
from loraserve_kernels.backend import Backend
from loraserve_kernels.cpu_backend import CpuBackend
from loraserve_kernels.cpu_library import CpuLibrary
from loraserve_kernels.four_bit_weight import FourBitLinear, FourBitWeight, dequantize_weight, joined, to_scales
from loraserve_kernels.packed_linear import PackedLinear
from loraserve_kernels.quantization import STORED, Quantization
from loraserve_kernels.reference_backend import ReferenceBackend
from torch import Tensor

from tests.kernels.four_bits import in_other_order, make_four_bits, multiples_and_scales

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MXFP4, NF4, UINT4, UINT4_G128 = STORED


def codes_of(num_outputs: int, depth: int) -> Tensor:
    return torch.zeros(num_outputs, depth // 2, dtype=torch.uint8)


def scales_of(num_outputs: int, num_groups: int) -> Tensor:
    return torch.ones(num_outputs, num_groups).bfloat16()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", STORED)
@pytest.mark.parametrize("shape", [(1, 128), (7, 384), (40, 1152)], ids=str)
def test_a_dequantized_weight_is_its_multiples_times_its_scales(
    any_library: CpuLibrary, shape: tuple[int, int], form: Quantization, dtype: torch.dtype
) -> None:
    weight = make_four_bits(form, shape)
    multiples, scales = multiples_and_scales(weight)
    expected = (multiples.double() * scales.double()).flatten(1).to(dtype)
    for backend in (ReferenceBackend(), CpuBackend(any_library)):
        out = torch.full(shape, torch.nan, dtype=dtype)
        assert backend.dequantize_weight(weight, out) is out
        assert torch.equal(out, expected)


@pytest.mark.parametrize("form", STORED)
def test_dequantizing_in_pieces_gives_the_same_weight(monkeypatch: pytest.MonkeyPatch, form: Quantization) -> None:
    weight = make_four_bits(form, (30, 256))
    whole = dequantize_weight(weight, torch.empty(30, 256))
    monkeypatch.setattr("loraserve_kernels.four_bit_weight._PIECE", 1000)
    assert torch.equal(dequantize_weight(weight, torch.empty(30, 256)), whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", STORED)
def test_a_linear_multiplies_by_the_dequantized_weight(
    cpu_library: CpuLibrary, form: Quantization, dtype: torch.dtype
) -> None:
    weight = make_four_bits(form, (50, 128), 2**-20)
    bias = torch.randn(50, generator=torch.Generator().manual_seed(1)).to(dtype)
    x = torch.randn(2, 5, 128, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = torch.nn.functional.linear(x, dequantize_weight(weight, torch.empty(50, 128, dtype=dtype)), bias)
    plain = FourBitLinear(weight, bias, dtype)
    assert torch.equal(plain(x), expected)
    with pytest.raises(ValueError, match=r"^x is"):
        plain(x[..., :64])
    ours = CpuBackend(cpu_library).four_bit_linear(weight, bias, dtype)
    difference = (ours(x).double() - expected.double()).abs().amax((0, 1))
    assert (difference <= 4 * torch.finfo(dtype).eps * expected.double().abs().amax((0, 1))).all()


@pytest.mark.parametrize("form", STORED)
def test_a_joined_weight_has_the_outputs_of_all_parts(form: Quantization) -> None:
    weights = [make_four_bits(form, (num_outputs, 128)) for num_outputs in (3, 5, 1)]
    wholes = [dequantize_weight(weight, torch.empty(weight.shape)) for weight in weights]
    assert torch.equal(dequantize_weight(joined(weights), torch.empty(9, 128)), torch.cat(wholes))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", STORED)
def test_groups_of_scattered_inputs_are_dequantized_and_multiplied(
    cpu_library: CpuLibrary, monkeypatch: pytest.MonkeyPatch, form: Quantization, dtype: torch.dtype
) -> None:
    weight = make_four_bits(form, (40, 384), 2**-20)
    other = in_other_order(weight)
    assert other.order is not None
    expected = torch.empty(40, 384, dtype=dtype)
    expected[:, other.order] = dequantize_weight(weight, torch.empty_like(expected))
    monkeypatch.setattr("loraserve_kernels.four_bit_weight._PIECE", 5000)
    for backend in (ReferenceBackend(), CpuBackend(cpu_library)):
        assert torch.equal(backend.dequantize_weight(other, torch.full_like(expected, torch.nan)), expected)
    x = torch.randn(3, 384, generator=torch.Generator().manual_seed(2)).to(dtype)
    assert torch.equal(FourBitLinear(other, None, dtype)(x), torch.nn.functional.linear(x, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", STORED)
@pytest.mark.parametrize("num_rows", [1, 16, 17, 50])
def test_a_linear_with_reordered_inputs_matches_one_in_order_bit_for_bit(
    any_library: CpuLibrary, monkeypatch: pytest.MonkeyPatch, num_rows: int, form: Quantization, dtype: torch.dtype
) -> None:
    """Only the order of the inputs differs, also on several threads."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    weight = make_four_bits(form, (300, 384))
    other = in_other_order(weight)
    assert other.order is not None
    x = torch.randn(num_rows, 400, generator=torch.Generator().manual_seed(4)).to(dtype)[:, :384]
    in_order = PackedLinear(weight, None, any_library, dtype=dtype)
    linear = PackedLinear(other, None, any_library, dtype=dtype)
    assert torch.equal(linear(x), in_order(x[:, other.order]))
    places = torch.tensor([299, 0, 7])
    assert torch.equal(linear.rows(places)[:, other.order], in_order.rows(places))


def test_only_weights_with_the_same_order_can_be_joined() -> None:
    weight = make_four_bits(UINT4, (2, 64))
    other = in_other_order(weight)
    both = joined([other, replace(other, codes=other.codes.clone())])
    assert both.order is not None
    assert torch.equal(dequantize_weight(both, torch.empty(4, 64))[2:], dequantize_weight(other, torch.empty(2, 64)))
    assert other.order is not None
    for another in (weight, replace(weight, order=other.order.flip(0))):
        for parts in ([other, another], [another, other]):
            with pytest.raises(ValueError, match=r"^order is several"):
                joined(parts)


@pytest.mark.parametrize(
    "order",
    [torch.arange(64), torch.arange(63).int(), torch.arange(1, 65).int(), torch.zeros(64).int()],
    ids=["int64", "short", "beyond", "once"],
)
def test_an_invalid_order_is_refused(order: Tensor) -> None:
    with pytest.raises(ValueError, match=r"^order is"):
        replace(make_four_bits(UINT4, (2, 64)), order=order)


def test_subnormal_scales_become_zero() -> None:
    """CPUs may or may not treat them as zero."""
    tiny = torch.finfo(torch.bfloat16).tiny
    found = to_scales(torch.tensor([tiny, -tiny, tiny / 2, -tiny / 2, 0.3]))
    assert found.tolist() == [tiny, -tiny, 0, 0, torch.tensor(0.3).bfloat16().item()]


@pytest.mark.parametrize(
    ("form", "codes", "scales", "zeros", "name"),
    [
        (Quantization.INT4, codes_of(2, 96), scales_of(2, 3), None, "quantization"),
        (MXFP4, codes_of(2, 80), scales_of(2, 2), None, "codes"),
        (MXFP4, codes_of(2, 96).char(), scales_of(2, 3), None, "codes"),
        (MXFP4, codes_of(2, 192)[:, ::2], scales_of(2, 3), None, "codes"),
        (NF4, codes_of(2, 96), scales_of(2, 4), None, "scales"),
        (NF4, codes_of(2, 96), scales_of(2, 3).float(), None, "scales"),
        (NF4, codes_of(2, 96), scales_of(2, 3), torch.zeros(2, 3, dtype=torch.uint8), "zeros"),
        (UINT4, codes_of(2, 96), scales_of(2, 3), None, "zeros"),
        (UINT4_G128, codes_of(2, 192), scales_of(2, 1), torch.zeros(2, 1, dtype=torch.uint8), "codes"),
        (UINT4_G128, codes_of(2, 256), scales_of(2, 8), torch.zeros(2, 8, dtype=torch.uint8), "scales"),
        (UINT4, codes_of(2, 96), scales_of(2, 3), torch.zeros(2, 4, dtype=torch.uint8), "zeros"),
    ],
)
def test_an_invalid_part_of_a_weight_is_refused_by_name(
    form: Quantization, codes: Tensor, scales: Tensor, zeros: Tensor | None, name: str
) -> None:
    with pytest.raises(ValueError, match=f"^{name} is"):
        FourBitWeight(form, codes, scales, zeros)


@pytest.mark.parametrize("bias", [torch.zeros(49), torch.zeros(50, 1), torch.zeros(50).bfloat16()])
def test_a_bias_of_another_shape_or_dtype_is_refused(cpu_library: CpuLibrary, bias: Tensor) -> None:
    with pytest.raises(ValueError, match=r"^bias is"):
        CpuBackend(cpu_library).four_bit_linear(make_four_bits(NF4, (50, 96)), bias, torch.float32)


@pytest.mark.parametrize("out", [torch.empty(2, 95), torch.empty(96, 2).T])
def test_dequantizing_into_a_tensor_of_another_shape_or_stride_is_refused(cpu_library: CpuLibrary, out: Tensor) -> None:
    backends: list[Backend] = [ReferenceBackend(), CpuBackend(cpu_library)]
    for backend in backends:
        with pytest.raises(ValueError, match=r"^out is"):
            backend.dequantize_weight(make_four_bits(UINT4, (2, 96)), out)
