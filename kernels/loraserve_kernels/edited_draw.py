"""Tokens chosen on the host from rows of logits that are edited first, a whole batch at once."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from loraserve_kernels.checks import mismatch
from loraserve_kernels.draw import Draw, pack_draws
from loraserve_kernels.logit_edits import ListedTokens

_EDITS = struct.Struct("<QQQqQQqfffi")
"""`struct edited_draw` of edited_draw.c, behind its draw."""


@dataclass(slots=True)
class CountedTokens:
    """The distinct tokens that penalties are for, and how often the output has each.

    Whoever has it may write to the arrays, and set `num_tokens` to how much of them is in use.
    """

    token_ids: NDArray[np.int64]
    counts: NDArray[np.float32]
    num_tokens: int
    addresses: tuple[int, int] = field(init=False)
    """Of the arrays."""

    def __post_init__(self) -> None:
        self.addresses = self.token_ids.ctypes.data, self.counts.ctypes.data


class EditedDraw(NamedTuple):
    """How a token is chosen from one row of logits; see `logit_edits.LogitEdits`."""

    draw: Draw
    """Below `LEAST_TEMPERATURE` the largest logit is chosen."""
    is_blank: bool
    listed: ListedTokens
    counted: CountedTokens | None = None
    """None: no penalties."""
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0


@runtime_checkable
class DrawsEdited(Protocol):
    """A backend that edits and draws where logits are in the host's memory."""

    def draw_edited(self, logits: Tensor, num_columns: int, draws: Sequence[EditedDraw]) -> list[int]:
        """A token for each draw, as `sampling.sample_reference` but for rounding; -1 where its row is not finite, or
        allows no token there is.

        logits: as of `DrawsOnHost.draw`, not written to. Token ids from num_columns on are passed over. A row that
        allows only some tokens and is not finite elsewhere may get one all the same.
        """
        ...


def check_edited_draws(draws: Sequence[EditedDraw], num_rows: int) -> None:
    """Raise `ValueError` unless they are of rows below num_rows."""
    for draw, *_ in draws:
        if not 0 <= draw.row < num_rows:
            raise mismatch("draw.row", draw.row, f"0 to {num_rows - 1}")


def pack_edited_draws(draws: Sequence[EditedDraw]) -> bytes:
    """As the C function reads them; valid as long as the draws."""
    return b"".join(map(_pack, draws))


def _pack(edited: EditedDraw) -> bytes:
    draw, is_blank, listed, counted, repetition, frequency, presence = edited
    addresses, num_counted = ((0, 0), 0) if counted is None else (counted.addresses, counted.num_tokens)
    edits = _EDITS.pack(
        *listed.addresses,
        len(listed.token_ids),
        *addresses,
        num_counted,
        repetition,
        frequency,
        presence,
        is_blank,
    )
    return pack_draws([draw]) + edits
