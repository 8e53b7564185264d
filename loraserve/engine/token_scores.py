"""Log-probabilities of tokens in passes over `LogitRows`: what `Sampler` does where no C function does it."""

import math
from collections.abc import Sequence

import numpy as np
from loraserve_kernels.score import Ask, Score
from torch import Tensor

from loraserve.engine.logit_rows import Floats, Ints, LogitRows, open_rows
from loraserve.engine.token_choice import most_narrow, top_candidates

ROWS_AT_A_TIME = 256


def score_tokens(logits: Tensor, vocab_size: int, asks: Sequence[Ask]) -> list[Score]:
    """`ScoresOnHost.score` but for rounding, of logits on any device."""
    raw = open_rows(logits, vocab_size)
    _, peaks = raw.argmax()
    scores = [Score(math.nan, 1, []) for _ in asks]
    finite = [index for index, ask in enumerate(asks) if np.isfinite(peaks[ask.row])]
    for start in range(0, len(finite), ROWS_AT_A_TIME):
        chunk = finite[start : start + ROWS_AT_A_TIME]
        row_ids, token_ids, num_tops = np.array([asks[index] for index in chunk]).T
        found = _score(raw, row_ids, peaks[row_ids], token_ids, np.minimum(num_tops, vocab_size))
        for index, score in zip(chunk, found, strict=True):
            scores[index] = score
    return scores


def _score(raw: LogitRows, row_ids: Ints, peaks: Floats, token_ids: Ints, num_tops: Ints) -> list[Score]:
    """Aligned with `row_ids`, rows with finite peaks."""
    ones = np.ones(len(row_ids), dtype=np.float32)
    masses = raw.lane_mass(row_ids, peaks, ones, np.full(len(row_ids), -np.inf, dtype=np.float32))
    log_totals = [
        float(peak) + math.log(mass) for peak, mass in zip(peaks, masses.sum(1, dtype=np.float64), strict=True)
    ]
    values = raw.gather(row_ids, token_ids)
    ranks = 1 + raw.count_above(row_ids, values)
    tops = _top(raw, row_ids, num_tops)
    return [
        Score(
            logprob=float(values[i]) - log_total,
            rank=int(ranks[i]),
            top=[(token_id, value - log_total) for token_id, value in tops[i]],
        )
        for i, log_total in enumerate(log_totals)
    ]


def _top(raw: LogitRows, row_ids: Ints, num_tops: Ints) -> list[list[tuple[int, float]]]:
    """Per row its most likely tokens with their logits."""
    tops: list[list[tuple[int, float]]] = [[] for _ in row_ids]
    narrow = np.flatnonzero((num_tops > 0) & (num_tops <= most_narrow(raw)))
    wide = np.flatnonzero(num_tops > most_narrow(raw))
    for places in (narrow, *wide[:, None]):  # a wide row is sorted whole: one at a time
        if len(places):
            found = top_candidates(raw, row_ids[places], num_tops[places])
            for index, ids, values in zip(places, found.token_ids.tolist(), found.values.tolist(), strict=True):
                tops[index] = list(zip(ids, values, strict=True))[: num_tops[index]]
    return tops
