import functools

import torch
from torch import Tensor, nn

from loraserve.models.forward_names import uses, uses_only


class Clamps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).clamp(max=7.0)


class ClampsWithin(nn.Module):
    def forward(self, x: Tensor) -> list[Tensor]:
        def clamp(y: Tensor) -> Tensor:
            return y.clamp(max=7.0)

        return [clamp(self.linear(x))]


def test_uses_only_reads_methods_and_attributes() -> None:
    assert uses_only(Clamps(), frozenset({"linear", "clamp", "relu"}))
    assert not uses_only(Clamps(), frozenset({"linear"}))
    assert not uses_only(Clamps(), frozenset({"clamp"}))


def test_uses_finds_methods_but_not_arguments() -> None:
    assert uses(Clamps(), "clamp")
    assert not uses(Clamps(), "x")


def test_uses_only_reads_nested_functions() -> None:
    assert not uses_only(ClampsWithin(), frozenset({"linear"}))


def test_uses_only_reads_the_function_that_a_decorator_wraps() -> None:
    class Decorated(nn.Module):
        @functools.wraps(Clamps.forward)
        def forward(self, *args: Tensor) -> Tensor:
            return Clamps.forward(self, *args)

    assert uses_only(Decorated(), frozenset({"linear", "clamp"}))
    assert not uses_only(Decorated(), frozenset({"forward"}))


def test_names_of_a_forward_without_code_are_unknown() -> None:
    module = nn.Identity()
    module.forward = torch.neg
    assert not uses_only(module, frozenset())
    assert not uses(module, "neg")
