"""Choose tokens on the host from rows of logits that are edited first, for a whole batch at once."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraserve_kernels.argmax import check_argmax
from loraserve_kernels.checks import mismatch
from loraserve_kernels.draw import Draw, draw_params, pack_draws
from loraserve_kernels.logit_edits import IN_PROMPT, ListedTokens, LogitEdits
from loraserve_kernels.sampling import sample_reference

_EDITS = struct.Struct("<QQQqQQqfffi")
"""`struct edited_draw` of edited_draw.c, after its draw."""


@dataclass(slots=True)
class CountedTokens:
    """The distinct tokens to which penalties apply, and how often each is in the output.

    The owner may write to the arrays, and sets `num_tokens` to the number of entries in use.
    """

    token_ids: NDArray[np.int64]
    counts: NDArray[np.float32]
    num_tokens: int
    addresses: tuple[int, int] = field(init=False)
    """Addresses of the arrays."""

    def __post_init__(self) -> None:
        self.addresses = self.token_ids.ctypes.data, self.counts.ctypes.data


class EditedDraw(NamedTuple):
    """How a token is chosen from one row of logits; see `logit_edits.LogitEdits`."""

    draw: Draw
    """With a temperature below `LEAST_TEMPERATURE`, the largest logit is chosen."""
    is_blank: bool
    listed: ListedTokens
    counted: CountedTokens | None = None
    """None = no penalties."""
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0


def check_edited_draws(draws: Sequence[EditedDraw], num_rows: int) -> None:
    """Raise `ValueError` unless all rows are below num_rows."""
    for draw, *_ in draws:
        if not 0 <= draw.row < num_rows:
            raise mismatch("draw.row", draw.row, f"0 to {num_rows - 1}")


def pack_edited_draws(draws: Sequence[EditedDraw]) -> bytes:
    """One `struct edited_draw` each, as the C function reads them; valid as long as the draws."""
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


def edited_draw_reference(logits: Tensor, num_columns: int, draws: Sequence[EditedDraw]) -> list[int]:
    """See `SamplesOnHost.draw_edited`."""
    check_argmax(logits, num_columns)
    check_edited_draws(draws, logits.shape[0])
    if not draws:
        return []
    rows, params = draw_params([edited.draw for edited in draws], logits.device)
    edits = _edits_of(draws, num_columns, logits.device)
    token_ids, is_finite = sample_reference(logits[rows], num_columns, params, edits)
    return torch.where(is_finite, token_ids, -1).tolist()


def _edits_of(draws: Sequence[EditedDraw], num_columns: int, device: torch.device) -> LogitEdits:
    def column(values: Sequence[object], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    listed = [edited.listed for edited in draws]
    counts = torch.zeros(len(draws), num_columns, dtype=torch.int32)
    for row, counted in zip(counts, (edited.counted for edited in draws), strict=True):
        if counted is not None:
            token_ids = counted.token_ids[: counted.num_tokens]
            is_inside = (token_ids >= 0) & (token_ids < num_columns)
            num_outputs = counted.counts[: counted.num_tokens][is_inside].astype(np.int32)
            row[torch.from_numpy(token_ids[is_inside])] = torch.from_numpy(num_outputs | IN_PROMPT)
    return LogitEdits(
        is_edited=column([True] * len(draws), torch.int8),
        is_blank=column([edited.is_blank for edited in draws], torch.int8),
        start=column([0, *np.cumsum([len(each.token_ids) for each in listed])], torch.int32),
        token_ids=torch.from_numpy(np.concatenate([each.token_ids for each in listed])).to(device),
        biases=torch.from_numpy(np.concatenate([each.biases for each in listed])).to(device),
        marks=torch.from_numpy(np.concatenate([each.marks for each in listed])).to(device),
        repetition=column([edited.repetition for edited in draws], torch.float32),
        frequency=column([edited.frequency for edited in draws], torch.float32),
        presence=column([edited.presence for edited in draws], torch.float32).double(),  # rounded as in the C function
        count_row=column([-1 if each.counted is None else row for row, each in enumerate(draws)], torch.int32),
        token_counts=counts.to(device),
    )
