"""Which weights that a module multiplies by itself can have adapters."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from loraserve.models.bare_weights import BareWeightSpec, recorded_bare_weights

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


class Router(nn.Module):
    def __init__(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, generator=torch.Generator().manual_seed(1)))
        self._use = use

    def forward(self, x: Tensor) -> Tensor:
        return self._use(x, self.weight)


def record(use: Callable[[Tensor, Tensor], Tensor]) -> tuple[list[str], set[str]]:
    """The noted and the excluded names. Recording must not change the output."""
    model = nn.Sequential(nn.Linear(4, 4), Router(use))
    expected = model(X)
    noted: list[str] = []

    def note(spec: BareWeightSpec, x: Tensor) -> None:
        assert x.shape == X.shape
        noted.append(spec.name)

    with recorded_bare_weights(model, note) as excluded:
        assert torch.equal(model(X), expected)
    assert type(model[1].weight) is nn.Parameter
    assert torch.equal(model(X), expected)
    return noted, excluded


@pytest.mark.parametrize(
    "use",
    [
        linear,
        lambda x, weight: linear(x, weight, torch.ones(3)),
        lambda x, weight: linear(x, weight, bias=torch.ones(3)),
        lambda x, weight: linear(x.to(weight.dtype), weight),
    ],
    ids=["plain", "bias", "named_bias", "dtype"],
)
def test_a_weight_used_only_in_linear_can_have_adapters(use: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert record(use) == (["1.weight"], set())


@pytest.mark.parametrize(
    ("use", "noted"),
    [
        (lambda x, weight: linear(x, weight.double().float()), []),
        (lambda x, weight: x @ weight.T, []),
        (lambda x, weight: linear(x, weight) * weight.norm(), ["1.weight"]),
        (lambda x, weight: torch.cat([linear(x, weight), linear(x, weight.abs())]), ["1.weight"]),
    ],
    ids=["cast", "matmul", "norm", "changed"],
)
def test_a_weight_used_in_another_way_cannot_have_adapters(
    use: Callable[[Tensor, Tensor], Tensor], noted: list[str]
) -> None:
    assert record(use) == (noted, {"1.weight"})


def test_a_weight_multiplied_with_other_rows_cannot_have_adapters() -> None:
    model = nn.Sequential(Router(lambda x, weight: torch.cat([linear(x, weight), linear(x[:2], weight)])))
    with recorded_bare_weights(model, lambda *_: None) as excluded:
        model(X)
    assert excluded == {"0.weight"}


def test_a_weight_multiplied_in_another_dtype_cannot_have_adapters() -> None:
    model = nn.Sequential(Router(lambda x, weight: linear(x, weight)))
    with recorded_bare_weights(model, lambda *_: None) as excluded, torch.autocast("cpu", torch.bfloat16):
        model(X.bfloat16())
    assert excluded == {"0.weight"}
