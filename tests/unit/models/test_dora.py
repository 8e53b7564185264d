"""DoRA factors against their definition computed in float64."""

from functools import partial

import numpy as np
import pytest
import torch
from loraserve_adapters.packed import PackedTable
from loraserve_kernels.adapter_table import LoraGroup
from loraserve_kernels.choose_backend import choose_backend
from loraserve_kernels.quantization import ROUNDINGS, Quantization
from torch import Tensor

from loraserve.models.dora import DoraGroup, find_factors, squared_norms

IN_FEATURES = 40
OUT_FEATURES = (24, 8, 16)
ALIGNED = 128
"""Elements."""
TOLERANCE = {torch.float32: 5e-7, torch.bfloat16: 1e-3, torch.float16: 2e-4}
"""Relative error of a factor that a product W Aᵀ rounded to the dtype may cause."""


class Case:
    """One group with an adapter; neither the group nor its members are the layout's first."""

    def __init__(
        self,
        dtype: torch.dtype,
        ranks: tuple[int, ...],
        *,
        is_dora: tuple[bool, ...] = (True, True, True),
        bias: float = 0.0,
        quantization: Quantization | None = None,
        of_a: float = 1.0,
        of_b: float = 1.0,
        of_scaling: float = 1.0,
    ) -> None:
        """bias: its size, 0 = none. of_a, of_b, of_scaling: factors on their default values."""
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        backend, _ = choose_backend("cpu")
        weight = (random(sum(OUT_FEATURES), IN_FEATURES) / IN_FEATURES**0.5).to(dtype)
        rounded = partial(backend.rounded_weight, quantization=quantization) if quantization else None
        self.weight = rounded(weight) if rounded else weight
        self.bias = (bias * random(sum(OUT_FEATURES))).to(dtype) if bias else None
        linear = backend.linear(weight, self.bias, keep_weight=False, quantization=quantization)
        norms = squared_norms(weight, rounded)
        group = LoraGroup(1, 2, IN_FEATURES, OUT_FEATURES)
        self.linears = DoraGroup(linear, self.bias, norms, group)
        self.a = [(of_a * random(rank, IN_FEATURES) / IN_FEATURES**0.5).to(dtype) for rank in ranks]
        self.b = [
            (of_b * random(rank, n) / max(rank, 1) ** 0.5).to(dtype)
            for rank, n in zip(ranks, OUT_FEATURES, strict=True)
        ]
        self.magnitude = [1 + random(n).abs() for n in OUT_FEATURES]
        self.scaling = [of_scaling * scaling for scaling in (0.5, 2.0, 1.25)]
        absent = np.full(2, -1, np.int64)
        pieces: list[Tensor] = []

        def put(values: Tensor) -> int:
            start = sum(map(len, pieces))
            pieces.append(values.flatten())
            pieces.append(torch.full((-values.numel() % ALIGNED + ALIGNED,), torch.nan, dtype=dtype))
            return start

        offset_a = put(torch.cat(self.a))
        self.offset_magnitude = []
        offset_b = []
        for b, magnitude, has in zip(self.b, self.magnitude, is_dora, strict=True):
            offset_b.append(put(b))
            both = torch.stack([magnitude, torch.zeros_like(magnitude)])
            self.offset_magnitude.append(put(both.view(dtype)) if has else -1)
        self.values = torch.cat(pieces)
        self.table = PackedTable(
            "layout",
            str(dtype).removeprefix("torch."),
            max(ranks),
            offset_a=np.array([-1, offset_a]),
            offset_b=np.concatenate([absent, offset_b]),
            offset_bias=np.full(5, -1, np.int64),
            offset_magnitude=np.concatenate([absent, self.offset_magnitude]),
            lora_rank=np.array([0, 0, *ranks], np.int32),
            scaling=np.array([0, 0, *self.scaling], np.float32),
        )

    def found(self, member: int) -> tuple[Tensor, Tensor]:
        """Factors and addends of a member with DoRA."""
        start, num_outputs = self.offset_magnitude[member], OUT_FEATURES[member]
        both = self.values[start : start + 2 * num_outputs * 4 // self.values.itemsize].view(torch.float32)
        return both[:num_outputs], both[num_outputs:]

    def expected(self, member: int) -> tuple[Tensor, Tensor]:
        start = sum(OUT_FEATURES[:member])
        outputs = slice(start, start + OUT_FEATURES[member])
        product = self.b[member].double().T @ self.a[member].double()
        norms = (self.weight[outputs].double() + self.scaling[member] * product).norm(dim=1)
        factors = self.magnitude[member].double() / norms
        bias = torch.zeros(1) if self.bias is None else self.bias[outputs]
        return factors, bias.double() * (1 - factors)


def difference(case: Case, member: int) -> float:
    """The larger of the factors' relative error and the addends' error relative to the largest bias (at least 1)."""
    (factors, added), (expected, expected_added) = case.found(member), case.expected(member)
    largest = 1.0 if case.bias is None else max(1.0, float(case.bias.abs().max()))
    return max(float((factors / expected - 1).abs().max()), float((added - expected_added).abs().max()) / largest)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bias", [0.0, 0.1, 300.0])
@pytest.mark.parametrize("ranks", [(1, 1, 1), (4, 9, 2), (70, 130, 64)])
def test_factors_are_magnitudes_over_norms(dtype: torch.dtype, bias: float, ranks: tuple[int, ...]) -> None:
    case = Case(dtype, ranks, bias=bias)
    find_factors([case.linears], case.table, case.values)
    for member in range(3):
        assert difference(case, member) <= TOLERANCE[dtype]


@pytest.mark.parametrize("bias", [0.0, 1.0])
@pytest.mark.parametrize(
    ("dtype", "of_a", "of_b", "of_scaling"),
    [
        (torch.float32, 1e20, 1e-20, 1.0),
        (torch.bfloat16, 1e-20, 1e20, 1.0),
        (torch.bfloat16, 2.0**120, 2.0**-120, 1.0),
        (torch.float32, 1.0, 1e-30, 1e30),
        (torch.bfloat16, 1e-30, 1.0, 1e30),
        (torch.float16, 2.0**14, 2.0**-10, 2.0**-4),
    ],
)
def test_factors_are_right_for_values_whose_squares_leave_the_dtypes_range(
    dtype: torch.dtype, of_a: float, of_b: float, of_scaling: float, bias: float
) -> None:
    """An upload with such values once ended the engine, and the server with it, when it was tried."""
    case = Case(dtype, (4, 9, 2), bias=bias, of_a=of_a, of_b=of_b, of_scaling=of_scaling)
    find_factors([case.linears], case.table, case.values)
    for member in range(3):
        assert difference(case, member) <= 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("quantization", ROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_quantized_weights_are_those_of_the_rounded_weights(
    dtype: torch.dtype, quantization: Quantization
) -> None:
    case = Case(dtype, (4, 9, 2), bias=1.0, quantization=quantization)
    find_factors([case.linears], case.table, case.values)
    for member in range(3):
        assert difference(case, member) <= TOLERANCE[dtype]


def test_only_the_magnitudes_of_dora_members_are_changed() -> None:
    case = Case(torch.bfloat16, (4, 0, 3), is_dora=(False, False, True))
    before = case.values.clone()
    find_factors([case.linears], case.table, case.values)
    start = case.offset_magnitude[2]
    is_changed = case.values.view(torch.int16) != before.view(torch.int16)
    assert not is_changed[:start].any()
    assert not is_changed[start + 4 * OUT_FEATURES[2] :].any()
    assert difference(case, 2) <= TOLERANCE[torch.bfloat16]


def test_plain_adapters_are_unchanged() -> None:
    case = Case(torch.float32, (4, 2, 3), is_dora=(False, False, False))
    before = case.values.clone()
    find_factors([case.linears], case.table, case.values)
    assert torch.equal(case.values.view(torch.int32), before.view(torch.int32))


def test_outputs_whose_weights_are_all_zero_have_a_factor_of_zero() -> None:
    """PEFT would divide by zero."""
    case = Case(torch.float32, (4, 2, 3))
    case.linears.squared_norms[0] = 0
    case.values[case.table.offset_b[2] : case.table.offset_b[2] + 4 * OUT_FEATURES[0]].view(4, -1)[:, 0] = 0
    find_factors([case.linears], case.table, case.values)
    factors, _ = case.found(0)
    assert factors[0] == 0
    assert factors[1:].isfinite().all()
