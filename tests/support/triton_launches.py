"""Launches of interpreted Triton kernels, without the content of their tensors: what a CUDA graph would record."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch


@dataclass(frozen=True, slots=True)
class Launch:
    kernel: str
    grid: tuple[int, ...]
    arguments: tuple[object, ...]
    """Scalars as they are; for tensors, shape, strides and dtype."""


def checked_replay(call: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes the call, and returns one that makes it again and fails unless all launches equal those of the first."""
    from triton.runtime.interpreter import InterpretedFunction

    launches: list[Launch] = []
    run = InterpretedFunction.run

    def recorded(self: InterpretedFunction, *args: object, grid: tuple[int, ...], **kwargs: object) -> object:
        arguments = tuple(_without_content(argument) for argument in (*args, *kwargs.values()))
        launches.append(Launch(self.fn.__name__, tuple(grid), arguments))
        return run(self, *args, grid=grid, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", recorded)
    call()
    first = list(launches)
    assert first, "nothing was launched"

    def again() -> None:
        launches.clear()
        call()
        assert launches == first, f"launched {launches} after {first}"

    return again


def _without_content(argument: object) -> object:
    return (argument.shape, argument.stride(), argument.dtype) if isinstance(argument, torch.Tensor) else argument
