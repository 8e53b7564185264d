"""From logits and one uniform number per row to a token: min_p, top_k, top_p, then the inverse CDF.

Every row is drawn by inverse CDF over its kept tokens in some fixed order, and which order depends on the row's own
parameters and logits only:

- top_k or top_p: the most likely first, equal logits by ascending id. Only the tokens above a threshold are sorted: the
  k-th largest lane maximum, which at least k tokens reach. A nucleus (top_p without top_k) is looked for among
  `NUCLEUS_PROBE` tokens first and, if it is larger than that, among all that are not too light for it.
- neither: lane by lane, so that the cumulative sum is over lanes and then inside one lane, and nothing is sorted.

Probabilities are float64 sums of float64 exponentials, but for the lane sums, which are float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loraserve.engine.logit_rows import Floats, Ints, LogitRows
from loraserve.engine.sampling_noise import uniforms
from loraserve.engine.sampling_row import SamplingRow

NUCLEUS_PROBE = 512
"""Tokens among which a nucleus is looked for first: 13 ms at 64 x 151936, 15 ms with 1024; a miss costs 6 ms more."""

Doubles = NDArray[np.float64]

_PAD_KEY = np.uint64(0xFF800000_FFFFFFFF)
"""The sort key of logit -inf and an id beyond any vocabulary: after every token."""


@dataclass(slots=True)
class Candidates:
    """The most likely tokens of n rows, best first, equal logits by ascending id; padded with -inf to one length."""

    token_ids: Ints
    """[n, C]"""
    values: Floats
    """[n, C] logits."""
    counts: Ints
    """[n] tokens that are not padding: at least as many as were asked for."""


@dataclass(slots=True)
class Draws:
    """One draw per row, as columns: row_ids, peaks, ... are all [n]."""

    row_ids: Ints
    peaks: Floats
    """The row's largest logit, finite."""
    floors: Floats
    """min_p as a logit: tokens below it are out."""
    temperatures: Doubles
    top_k: Ints
    """The vocabulary's size where there is none."""
    top_p: Doubles
    uniforms: Doubles

    def take(self, where: NDArray[np.bool_] | Ints) -> "Draws":
        return Draws(
            self.row_ids[where],
            self.peaks[where],
            self.floors[where],
            self.temperatures[where],
            self.top_k[where],
            self.top_p[where],
            self.uniforms[where],
        )


def choose_tokens(logits: LogitRows, row_ids: Ints, peaks: Floats, rows: Sequence[SamplingRow]) -> Ints:
    """One token for each of `row_ids`; `peaks` (their largest logits, finite) and `rows` are aligned with them."""
    draws = _make_draws(logits, row_ids, peaks, rows)
    has_top_k = draws.top_k < logits.vocab_size
    has_nucleus = ~has_top_k & (draws.top_p < 1)
    is_narrow = draws.top_k <= most_narrow(logits)
    chosen = np.empty(len(row_ids), dtype=np.int64)
    for where, choose in (
        (has_top_k & is_narrow, _choose_of_top_k),
        (has_top_k & ~is_narrow, _choose_one_by_one),
        (has_nucleus, _choose_of_nucleus),
        (~has_top_k & ~has_nucleus, _choose_of_all),
    ):
        if where.any():
            chosen[where] = choose(logits, draws.take(where))
    return chosen


def most_narrow(logits: LogitRows) -> int:
    """The most tokens of a row that lane maxima find without sorting the row: towards all lanes the threshold sinks."""
    return logits.num_lanes * 3 // 4


def top_candidates(logits: LogitRows, row_ids: Ints, num_wanted: Ints) -> Candidates:
    """At least the `num_wanted` (1 to V, [n]) most likely tokens of each row.

    Every token that ties with a row's last is there too, so that cutting at `num_wanted` is deterministic.
    """
    thresholds = np.full(len(row_ids), -np.inf, dtype=np.float32)
    narrow = np.flatnonzero(num_wanted <= most_narrow(logits))
    if len(narrow):
        maxima = logits.lane_max(row_ids[narrow])
        kth = logits.num_lanes - num_wanted[narrow]
        maxima.partition(np.unique(kth), axis=1)
        thresholds[narrow] = maxima[np.arange(len(narrow)), kth]
    return _sort_candidates(len(row_ids), *logits.at_least(row_ids, thresholds))


def _make_draws(logits: LogitRows, row_ids: Ints, peaks: Floats, rows: Sequence[SamplingRow]) -> Draws:
    temperatures = np.array([row.params.temperature for row in rows], dtype=np.float64)
    top_k = np.array([row.params.top_k for row in rows], dtype=np.int64)
    min_p = np.array([row.params.min_p for row in rows], dtype=np.float64)
    with np.errstate(divide="ignore"):
        floors = (peaks + temperatures * np.log(min_p)).astype(np.float32)
    return Draws(
        row_ids=row_ids,
        peaks=peaks,
        floors=floors,
        temperatures=temperatures,
        top_k=np.where((top_k <= 0) | (top_k > logits.vocab_size), logits.vocab_size, top_k),
        top_p=np.array([row.params.top_p for row in rows], dtype=np.float64),
        uniforms=uniforms([row.seed for row in rows], [row.position for row in rows]),
    )


def _choose_one_by_one(logits: LogitRows, draws: Draws) -> Ints:
    """For rows that are sorted whole: that takes some 50 bytes a token."""
    each = np.arange(len(draws.row_ids))[:, None]
    return np.array([_choose_of_top_k(logits, draws.take(one))[0] for one in each], dtype=np.int64)


def _choose_of_top_k(logits: LogitRows, draws: Draws) -> Ints:
    candidates = top_candidates(logits, draws.row_ids, draws.top_k)
    weights = _weigh(candidates.values, draws)
    weights[np.arange(weights.shape[1]) >= draws.top_k[:, None]] = 0
    return _choose_of_sorted(candidates, weights, weights.cumsum(axis=1)[:, -1], draws)


def _choose_of_nucleus(logits: LogitRows, draws: Draws) -> Ints:
    probe = max(1, min(NUCLEUS_PROBE, most_narrow(logits)))
    candidates = top_candidates(logits, draws.row_ids, np.full(len(draws.row_ids), probe))
    weights = _weigh(candidates.values, draws)
    totals = _lane_mass(logits, draws).sum(axis=1, dtype=np.float64)
    is_inside = weights.cumsum(axis=1)[:, -1] >= draws.top_p * totals
    chosen = _choose_of_sorted(candidates, weights, totals, draws)
    for index in np.flatnonzero(~is_inside):
        one = np.array([index])
        chosen[one] = _choose_of_large_nucleus(logits, draws.take(one), totals[one])
    return chosen


def _choose_of_large_nucleus(logits: LogitRows, draws: Draws, totals: Doubles) -> Ints:
    """For one row. Tokens lighter than (1 - top_p) / 2V of the total weigh less than 1 - top_p together: none is in."""
    least_weight = (1 - draws.top_p) / 2 * totals / logits.vocab_size
    thresholds = (draws.peaks + draws.temperatures * np.log(least_weight)).astype(np.float32)
    candidates = _sort_candidates(1, *logits.at_least(draws.row_ids, np.minimum(thresholds, draws.peaks)))
    return _choose_of_sorted(candidates, _weigh(candidates.values, draws), totals, draws)


def _choose_of_all(logits: LogitRows, draws: Draws) -> Ints:
    masses = _lane_mass(logits, draws).astype(np.float64)
    lanes, inner_uniforms = _invert_cdf(masses, draws.uniforms)
    token_ids = lanes[:, None] + np.arange(-(-logits.vocab_size // logits.num_lanes)) * logits.num_lanes
    is_token = token_ids < logits.vocab_size
    token_ids[~is_token] = 0
    values = logits.gather(np.broadcast_to(draws.row_ids[:, None], token_ids.shape), token_ids)
    weights = np.where(is_token, _weigh(values, draws), 0)
    places, _ = _invert_cdf(weights, inner_uniforms)
    return token_ids[np.arange(len(places)), places]


def _choose_of_sorted(candidates: Candidates, weights: Doubles, totals: Doubles, draws: Draws) -> Ints:
    """`totals`: the weight of all tokens that top_p is a share of."""
    cumulative = weights.cumsum(axis=1)
    is_past = cumulative[:, :-1] >= (draws.top_p * totals)[:, None]
    weights[:, 1:][is_past & (draws.top_p < 1)[:, None]] = 0
    places, _ = _invert_cdf(weights, draws.uniforms)
    return candidates.token_ids[np.arange(len(places)), places]


def _weigh(values: Floats, draws: Draws) -> Doubles:
    """exp((logit - peak) / temperature), 0 below the floor; [n, C]."""
    distances = values.astype(np.float64) - draws.peaks[:, None]
    return np.where(values >= draws.floors[:, None], np.exp(distances / draws.temperatures[:, None]), 0)


def _lane_mass(logits: LogitRows, draws: Draws) -> Floats:
    return logits.lane_mass(draws.row_ids, draws.peaks, draws.temperatures.astype(np.float32), draws.floors)


def _invert_cdf(weights: Doubles, targets: Doubles) -> tuple[Ints, Doubles]:
    """The place where each row's cumulative share passes its target in [0, 1), and how far into that place it is.

    NOTE: never a place of weight 0: the first place whose cumulative weight is larger than the target has some.
    """
    cumulative = weights.cumsum(axis=1)
    totals = cumulative[:, -1]
    passed = np.minimum(targets * totals, np.nextafter(totals, 0))
    places = np.count_nonzero(cumulative <= passed[:, None], axis=1)
    rows = np.arange(len(places))
    before = np.where(places > 0, cumulative[rows, places - 1], 0)
    return places, (passed - before) / weights[rows, places]


def _sort_candidates(num_rows: int, indices: Ints, token_ids: Ints, values: Floats) -> Candidates:
    """Sorts by one integer per token, the logit's bits above the id: 0.5 ms for 151936 tokens, a stable sort 35 ms."""
    counts = np.bincount(indices, minlength=num_rows)
    columns = np.arange(len(indices)) - np.repeat(counts.cumsum() - counts, counts)
    keys = np.full((num_rows, counts.max()), _PAD_KEY, dtype=np.uint64)
    bits = _flip((values + np.float32(0)).view(np.uint32))  # + 0 makes -0 equal to 0
    keys[indices, columns] = bits.astype(np.uint64) << np.uint64(32) | token_ids.astype(np.uint64)
    keys.sort(axis=1)
    return Candidates(
        token_ids=(keys & np.uint64(0xFFFFFFFF)).astype(np.int64),
        values=_flip((keys >> np.uint64(32)).astype(np.uint32)).view(np.float32),
        counts=counts,
    )


def _flip(bits: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Float bits to unsigned integers in the opposite order of the numbers (none of them NaN), and back."""
    return np.where(bits >> 31, bits, ~bits & np.uint32(0x7FFFFFFF))
