"""Tokens drawn on the host, a whole batch at once."""

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from loraserve_kernels.checks import mismatch
from loraserve_kernels.sampling import LEAST_TEMPERATURE

_MASK = (1 << 64) - 1
_DRAW = struct.Struct("<dddQQqq")
"""`struct draw` of draw.c."""


class Draw(NamedTuple):
    """How a token is drawn from one row of logits; see `sampling.DrawParams`."""

    row: int
    temperature: float
    """At least `LEAST_TEMPERATURE`."""
    top_k: int
    """Below 1 or above the vocabulary's size = all."""
    top_p: float
    min_p: float
    seed: int
    """It and the position: any integer, modulo 2^64."""
    position: int


@runtime_checkable
class DrawsOnHost(Protocol):
    """A backend that draws where logits are in the host's memory."""

    def draw(self, logits: Tensor, num_columns: int, draws: Sequence[Draw]) -> list[int]:
        """A token for each draw, as `sampling.sample_reference` but for rounding; -1 where its row is not finite.

        logits: [R, at least num_columns], rows may be strided; columns beyond num_columns are never read. A token
        depends on its row's logits and its draw only, bit for bit.
        """
        ...


def check_draws(draws: Sequence[Draw], num_rows: int) -> None:
    """Raise `ValueError` unless they are as `DrawsOnHost.draw` says, for so many rows of logits."""
    for draw in draws:
        if not 0 <= draw.row < num_rows:
            raise mismatch("draw.row", draw.row, f"0 to {num_rows - 1}")
        if not draw.temperature >= LEAST_TEMPERATURE:
            raise mismatch("draw.temperature", draw.temperature, f"at least {LEAST_TEMPERATURE}")


def pack_draws(draws: Sequence[Draw]) -> bytes:
    """As the C function reads them."""
    return b"".join(
        _DRAW.pack(
            draw.temperature,
            draw.top_p,
            math.log(draw.min_p) if draw.min_p > 0 else -math.inf,
            draw.seed & _MASK,
            draw.position & _MASK,
            draw.row,
            draw.top_k,
        )
        for draw in draws
    )
