"""Draw tokens on the host, for a whole batch at once."""

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from loraserve_kernels import sampling
from loraserve_kernels.argmax import check_argmax
from loraserve_kernels.checks import mismatch

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
    """Like the position, any integer, modulo 2^64."""
    position: int


def check_draws(draws: Sequence[Draw], num_rows: int) -> None:
    """Raise `ValueError` unless rows are below num_rows and temperatures at least `LEAST_TEMPERATURE`."""
    for draw in draws:
        if not 0 <= draw.row < num_rows:
            raise mismatch("draw.row", draw.row, f"0 to {num_rows - 1}")
        if not draw.temperature >= sampling.LEAST_TEMPERATURE:
            raise mismatch("draw.temperature", draw.temperature, f"at least {sampling.LEAST_TEMPERATURE}")


def pack_draws(draws: Sequence[Draw]) -> bytes:
    """One `struct draw` each, as the C function reads them."""
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


def draw_params(draws: Sequence[Draw], device: torch.device) -> tuple[list[int], sampling.DrawParams]:
    """(rows, their parameters as tensors [draws] on the device); draws: at least one."""
    rows, *columns = map(list, zip(*draws, strict=True))
    return rows, sampling.pack_draws(*columns, device=device)


def draw_reference(logits: Tensor, num_columns: int, draws: Sequence[Draw]) -> list[int]:
    """See `SamplesOnHost.draw`."""
    check_argmax(logits, num_columns)
    check_draws(draws, logits.shape[0])
    if not draws:
        return []
    rows, params = draw_params(draws, logits.device)
    token_ids, is_finite = sampling.sample_reference(logits[rows], num_columns, params, None)
    return torch.where(is_finite, token_ids, -1).tolist()
