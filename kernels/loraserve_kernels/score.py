"""Log-probabilities of tokens, computed on the host for a whole batch at once."""

import struct
from collections.abc import Sequence
from itertools import pairwise
from math import isnan, nan
from typing import NamedTuple

import torch
from torch import Tensor

from loraserve_kernels.argmax import check_argmax, most_likely
from loraserve_kernels.checks import mismatch


class ScoreQuery(NamedTuple):
    """One query: a row of logits, a token, and how many of the row's most likely tokens to return."""

    row: int
    token_id: int
    num_top: int
    """Most likely tokens to return; above the vocabulary's size = all."""


class Score(NamedTuple):
    """Log-probabilities: natural logarithms of the row's softmax."""

    logprob: float
    """The token's; NaN if the row's largest logit is not finite."""
    rank: int
    """1 + the number of tokens with a larger logit."""
    top: list[tuple[int, float]]
    """(token id, log-probability), most likely first, equal logits by ascending id; empty if `logprob` is NaN."""


def check_score_queries(queries: Sequence[ScoreQuery], num_rows: int, num_columns: int) -> None:
    """Raise `ValueError` unless rows and tokens are in range and no num_top is negative."""
    for query in queries:
        if not 0 <= query.row < num_rows:
            raise mismatch("query.row", query.row, f"0 to {num_rows - 1}")
        if not 0 <= query.token_id < num_columns:
            raise mismatch("query.token_id", query.token_id, f"0 to {num_columns - 1}")
        if query.num_top < 0:
            raise mismatch("query.num_top", query.num_top, "at least 0")


def pack_score_queries(queries: Sequence[ScoreQuery], num_columns: int) -> tuple[bytes, list[int]]:
    """(one `struct score_query` of score.c each, the start of each outcome and the end of the last)."""
    fields: list[int] = []
    starts = [0]
    for row, token_id, num_top in queries:
        num_top = min(num_top, num_columns)
        fields += (row, token_id, num_top, starts[-1])
        starts.append(starts[-1] + 1 + num_top)
    return struct.pack(f"<{len(fields)}q", *fields), starts


def read_scores(starts: Sequence[int], numbers: list[int], logprobs: list[float]) -> list[Score]:
    """From the outcomes as score.c writes them; starts: from `pack_score_queries`."""
    tops = list(zip(numbers, logprobs, strict=True))
    scores = []
    for start, end in pairwise(starts):
        logprob = logprobs[start]
        scores.append(Score(logprob, numbers[start], [] if isnan(logprob) else tops[start + 1 : end]))
    return scores


def score_reference(logits: Tensor, num_columns: int, queries: Sequence[ScoreQuery]) -> list[Score]:
    """See `SamplesOnHost.score`; in float64."""
    check_argmax(logits, num_columns)
    check_score_queries(queries, logits.shape[0], num_columns)
    return [_score_row(logits[query.row, :num_columns].double(), query) for query in queries]


def _score_row(row: Tensor, query: ScoreQuery) -> Score:
    if not row.max().isfinite():  # the maximum is NaN if any element is
        return Score(nan, 1, [])
    logprobs = row.log_softmax(0)
    order = most_likely(row, min(query.num_top, len(row))).tolist() if query.num_top else []
    rank = 1 + int(torch.count_nonzero(row > row[query.token_id]))
    return Score(float(logprobs[query.token_id]), rank, [(token_id, float(logprobs[token_id])) for token_id in order])
