"""Choose a token per row of logits: greedy, or by temperature, min_p, top_k, top_p and noise from (seed, position).

The semantics on every device:

- A row with NaN or +inf, or with nothing but -inf, is not finite and its token is undefined. If only the edits make all
  logits -inf, the row gets the allowed token with the largest raw logit, even if it is banned.
- Greedy: the largest logit. Here and below, equal logits are ordered by ascending id.
- top_k or top_p: the inverse CDF over the kept tokens, most likely first.
- Neither: the inverse CDF over all tokens, lane by lane: lane l of L = ceil(V / 64) holds tokens l, l + L, l + 2L, ...
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from loraserve_kernels.argmax import most_likely
from loraserve_kernels.checks import mismatch, require_dense, require_dense_last
from loraserve_kernels.logit_edits import IS_ALLOWED, LogitEdits, edit_row_reference
from loraserve_kernels.sampling_noise import uniform

LANE_LENGTH = 64
"""Tokens per lane."""
LEAST_TEMPERATURE = 1e-5
"""Rows with a lower temperature are greedy."""

_MASK = (1 << 64) - 1
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(slots=True)
class DrawParams:
    """Sampling parameters of R rows."""

    temperature: Tensor
    """float64 [R]; below `LEAST_TEMPERATURE` = greedy."""
    top_k: Tensor
    """int32 [R]; below 1 or above V = all."""
    top_p: Tensor
    """float64 [R]; 1 = all. A share of the weight that top_k and min_p leave."""
    log_min_p: Tensor
    """float64 [R]: log(min_p), -inf = no minimum."""
    seed: Tensor
    """int64 [R], modulo 2^64."""
    position: Tensor
    """int64 [R]."""


def pack_draws(
    temperatures: Sequence[float],
    top_ks: Sequence[int],
    top_ps: Sequence[float],
    min_ps: Sequence[float],
    seeds: Sequence[int],
    positions: Sequence[int],
    device: torch.device | str = "cpu",
) -> DrawParams:
    """From columns of requests' parameters; seeds are any Python integers."""
    words = np.array([seed & _MASK for seed in seeds], dtype=np.uint64).view(np.int64)
    floors = [math.log(min_p) if min_p > 0 else -math.inf for min_p in min_ps]
    return DrawParams(
        temperature=torch.tensor(temperatures, dtype=torch.float64, device=device),
        top_k=torch.tensor(top_ks, dtype=torch.int32, device=device),
        top_p=torch.tensor(top_ps, dtype=torch.float64, device=device),
        log_min_p=torch.tensor(floors, dtype=torch.float64, device=device),
        seed=torch.from_numpy(words).to(device),
        position=torch.tensor(positions, dtype=torch.int64, device=device),
    )


@runtime_checkable
class SamplesOnDevice(Protocol):
    """A backend that also chooses tokens."""

    def sample(
        self, logits: Tensor, vocab_size: int, draws: DrawParams | None, edits: LogitEdits | None
    ) -> tuple[Tensor, Tensor]:
        """See `sample_reference`. Does not wait for the device."""
        ...

    def count_tokens(self, edits: LogitEdits, token_ids: Tensor, is_finite: Tensor) -> None:
        """See `count_tokens_reference`. Does not wait for the device."""
        ...


def check_sample(logits: Tensor, vocab_size: int, draws: DrawParams | None, edits: LogitEdits | None) -> None:
    """Raise `ValueError` unless shapes, dtypes and devices are those of `sample_reference`."""
    if logits.dim() != 2 or not 0 < vocab_size <= logits.shape[1]:
        raise mismatch("logits", list(logits.shape), f"[R, at least vocab_size = {vocab_size} > 0]")
    if logits.dtype not in _DTYPES:
        raise mismatch("logits.dtype", logits.dtype, f"one of {', '.join(map(str, _DTYPES))}")
    require_dense_last("logits", logits)
    num_rows = logits.shape[0]
    expected: list[tuple[str, Tensor, torch.dtype, int]] = []
    if draws is not None:
        expected += [
            ("temperature", draws.temperature, torch.float64, num_rows),
            ("top_k", draws.top_k, torch.int32, num_rows),
            ("top_p", draws.top_p, torch.float64, num_rows),
            ("log_min_p", draws.log_min_p, torch.float64, num_rows),
            ("seed", draws.seed, torch.int64, num_rows),
            ("position", draws.position, torch.int64, num_rows),
        ]
    if edits is not None:
        num_listed = edits.token_ids.shape[0]
        expected += [
            ("is_edited", edits.is_edited, torch.int8, num_rows),
            ("is_blank", edits.is_blank, torch.int8, num_rows),
            ("start", edits.start, torch.int32, num_rows + 1),
            ("token_ids", edits.token_ids, torch.int32, num_listed),
            ("biases", edits.biases, torch.float32, num_listed),
            ("marks", edits.marks, torch.int8, num_listed),
            ("repetition", edits.repetition, torch.float32, num_rows),
            ("frequency", edits.frequency, torch.float32, num_rows),
            ("presence", edits.presence, torch.float64, num_rows),
            ("count_row", edits.count_row, torch.int32, num_rows),
        ]
        require_dense("token_counts", edits.token_counts, torch.int32)
        if edits.token_counts.dim() != 2 or edits.token_counts.shape[1] != vocab_size:
            raise mismatch("token_counts", list(edits.token_counts.shape), f"[P, {vocab_size}]")
        if edits.token_counts.device != logits.device:
            raise mismatch("token_counts.device", edits.token_counts.device, logits.device)
    for name, tensor, dtype, length in expected:
        require_dense(name, tensor, dtype)
        if tensor.shape != (length,):
            raise mismatch(name, list(tensor.shape), [length])
        if tensor.device != logits.device:
            raise mismatch(f"{name}.device", tensor.device, f"{logits.device}, as logits")


def sample_reference(
    logits: Tensor, vocab_size: int, draws: DrawParams | None, edits: LogitEdits | None
) -> tuple[Tensor, Tensor]:
    """(token ids int64 [R], is finite bool [R]) of logits [R, at least vocab_size]; further columns are padding.

    draws: None = all rows are greedy. edits: None = no edits. A row's result does not depend on other rows.
    """
    chosen = [_sample_row(logits[row, :vocab_size], row, draws, edits) for row in range(logits.shape[0])]
    token_ids = [0 if token_id is None else token_id for token_id in chosen]
    return (
        torch.tensor(token_ids, dtype=torch.int64, device=logits.device),
        torch.tensor([token_id is not None for token_id in chosen], dtype=torch.bool, device=logits.device),
    )


def _sample_row(raw: Tensor, row: int, draws: DrawParams | None, edits: LogitEdits | None) -> int | None:
    raw = raw.float()
    if not math.isfinite(raw.max()):
        return None
    logits = raw
    if edits is not None and edits.is_edited[row]:
        logits = edit_row_reference(raw, edits, row)
        if logits.max() == -torch.inf:
            return _best_allowed(raw, edits, row)
        if not math.isfinite(logits.max()):
            return None
    if draws is None or draws.temperature[row] < LEAST_TEMPERATURE:
        return _lowest_best(logits)
    return _draw(logits, draws, row)


def _best_allowed(raw: Tensor, edits: LogitEdits, row: int) -> int | None:
    if not edits.is_blank[row]:
        return _lowest_best(raw)
    listed = slice(int(edits.start[row]), int(edits.start[row + 1]))
    allowed = edits.token_ids[listed][(edits.marks[listed] & IS_ALLOWED) > 0].long().sort().values
    return int(allowed[_lowest_best(raw[allowed])]) if len(allowed) else None


def _lowest_best(logits: Tensor) -> int:
    return int((logits == logits.max()).nonzero()[0, 0])


def _draw(logits: Tensor, draws: DrawParams, row: int) -> int:
    vocab_size = len(logits)
    temperature, top_p = float(draws.temperature[row]), float(draws.top_p[row])
    top_k = int(draws.top_k[row])
    top_k = top_k if 0 < top_k <= vocab_size else vocab_size
    peak = logits.max()
    floor = (peak.double() + temperature * draws.log_min_p[row]).float()
    weights = ((logits.double() - peak.double()) / temperature).exp() * (logits >= floor)
    if top_k < vocab_size or top_p < 1:
        order = most_likely(logits, top_k)
        totals = weights[order].cumsum(0)
        order = order[: 1 + int((totals[:-1] < top_p * totals[-1]).sum())] if top_p < 1 else order
    else:
        num_lanes = -(-vocab_size // LANE_LENGTH)
        order = torch.arange(num_lanes * LANE_LENGTH, device=logits.device).view(LANE_LENGTH, num_lanes).T.flatten()
        order = order[order < vocab_size]
    cumulative = weights[order].cumsum(0)
    target = min(
        uniform(int(draws.seed[row]), int(draws.position[row])) * float(cumulative[-1]),
        math.nextafter(float(cumulative[-1]), 0),
    )
    return int(order[int((cumulative <= target).sum())])


def make_logits(
    num_rows: int,
    vocab_size: int,
    num_likely: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> Tensor:
    """Random logits. `num_likely` tokens of a row share nearly all its probability, as in text; all = flat."""
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator, device=device)
    likely = torch.rand(num_rows, vocab_size, generator=generator, device=device).topk(num_likely).indices
    return logits.scatter_add_(1, likely, torch.full(likely.shape, 14.0, device=device)).to(dtype)
