"""Log-probabilities of tokens on the host, of a whole batch at once."""

import struct
from collections.abc import Sequence
from itertools import pairwise
from math import isnan, nan
from typing import NamedTuple

import torch
from torch import Tensor

from loraserve_kernels.argmax import check_argmax, most_likely
from loraserve_kernels.checks import mismatch


class Ask(NamedTuple):
    """What is asked of one row of logits."""

    row: int
    token_id: int
    num_top: int
    """Of the most likely tokens; above the vocabulary's size = all."""


class Score(NamedTuple):
    """Log-probabilities: natural logarithms of the row's softmax."""

    logprob: float
    """The token's; NaN where the row's largest logit is not finite."""
    rank: int
    """1 + the number of tokens with a larger logit."""
    top: list[tuple[int, float]]
    """(token id, log-probability), most likely first, equal logits by ascending id; none if the row is not finite."""


def check_asks(asks: Sequence[Ask], num_rows: int, num_columns: int) -> None:
    """Raise `ValueError` unless rows and tokens are within so many, and nothing negative is asked for."""
    for ask in asks:
        if not 0 <= ask.row < num_rows:
            raise mismatch("ask.row", ask.row, f"0 to {num_rows - 1}")
        if not 0 <= ask.token_id < num_columns:
            raise mismatch("ask.token_id", ask.token_id, f"0 to {num_columns - 1}")
        if ask.num_top < 0:
            raise mismatch("ask.num_top", ask.num_top, "at least 0")


def pack_asks(asks: Sequence[Ask], num_columns: int) -> tuple[bytes, list[int]]:
    """`struct ask` of score.c for each, with where the outcome of each begins and the last one ends."""
    fields: list[int] = []
    starts = [0]
    for row, token_id, num_top in asks:
        num_top = min(num_top, num_columns)
        fields += (row, token_id, num_top, starts[-1])
        starts.append(starts[-1] + 1 + num_top)
    return struct.pack(f"<{len(fields)}q", *fields), starts


def read_scores(starts: Sequence[int], numbers: list[int], logprobs: list[float]) -> list[Score]:
    """From the outcomes that score.c describes."""
    tops = list(zip(numbers, logprobs, strict=True))
    scores = []
    for start, end in pairwise(starts):
        logprob = logprobs[start]
        scores.append(Score(logprob, numbers[start], [] if isnan(logprob) else tops[start + 1 : end]))
    return scores


def score_reference(logits: Tensor, num_columns: int, asks: Sequence[Ask]) -> list[Score]:
    """See `SamplesOnHost.score`; in float64."""
    check_argmax(logits, num_columns)
    check_asks(asks, logits.shape[0], num_columns)
    return [_score_row(logits[ask.row, :num_columns].double(), ask) for ask in asks]


def _score_row(row: Tensor, ask: Ask) -> Score:
    if not row.max().isfinite():  # of a row with NaN that is NaN
        return Score(nan, 1, [])
    logprobs = row.log_softmax(0)
    order = most_likely(row, min(ask.num_top, len(row))).tolist() if ask.num_top else []
    rank = 1 + int(torch.count_nonzero(row > row[ask.token_id]))
    return Score(float(logprobs[ask.token_id]), rank, [(token_id, float(logprobs[token_id])) for token_id in order])
