import functools

import pytest
import torch
from torch import Tensor, nn

from loraserve.models.forward_names import reads_weight_of, uses, uses_only


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


class ReadsOther(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.conv.weight


class ReadsDeepOther(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.linear.conv.weight


class ReadsItself(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.linear.weight


class ReadsBoth(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.linear.weight * self.conv.weight


class ReadsLocal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        layer = self.linear
        return x @ layer.weight


class ReadsResult(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.chosen(x).weight


class ReadsWithin(nn.Module):
    def forward(self, x: Tensor) -> list[Tensor]:
        return [(lambda y: y @ self.linear.weight)(x)]


class ReadsOwn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.weight


class NamesWeight(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x, weight="weight").bias


@pytest.mark.parametrize("module", [ReadsItself, ReadsBoth, ReadsWithin])
def test_a_forward_that_reads_a_childs_weight_is_found(module: type[nn.Module]) -> None:
    assert reads_weight_of(module(), "linear")
    assert reads_weight_of(module(), "conv") == (module is ReadsBoth)


@pytest.mark.parametrize("module", [Clamps, ReadsOther, ReadsDeepOther, NamesWeight])
def test_a_forward_that_reads_only_others_weights_does_not_read_a_childs(module: type[nn.Module]) -> None:
    assert not reads_weight_of(module(), "linear")


@pytest.mark.parametrize("module", [ReadsLocal, ReadsResult, ReadsOwn])
def test_a_weight_of_anything_else_may_be_a_childs(module: type[nn.Module]) -> None:
    assert reads_weight_of(module(), "linear")


def test_a_forward_without_code_reads_no_weight() -> None:
    module = nn.Identity()
    module.forward = torch.neg
    assert not reads_weight_of(module, "linear")
