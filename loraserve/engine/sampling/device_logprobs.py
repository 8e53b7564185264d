"""Log-probabilities computed on the logits' device: of tokens chosen there, returned with them, and of prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, nan

import torch
from torch import Tensor

from loraserve.engine.device.accelerator import Accelerator, upload_ids
from loraserve.engine.request import TokenLogprob
from loraserve.engine.sampling.row import SamplingRow

ROWS_PER_CHUNK = 32
LOGPROBS_BYTES = 28
"""Most memory per logit of these rows: two float32 copies, and a sort key with what it is computed from."""
_LOW_BITS = (1 << 32) - 1


@dataclass(slots=True)
class QueuedLogprobs:
    """For some rows of a batch; on the host once the batch's tokens are."""

    _rows: list[tuple[int, int]]
    """(row of the batch, how many of the most likely tokens to list)."""
    _on_host: Tensor
    """float64 [n, 3 + 2 C]: the chosen token's logit, log of the row's total, rank; ids and logits of the C best."""

    def read(self, token_ids: Sequence[int], is_finite: Sequence[bool]) -> list[TokenLogprob | None]:
        """Aligned with the batch's tokens: None if a row requests none or is not finite."""
        outcomes: list[TokenLogprob | None] = [None] * len(token_ids)
        for (row, num_top), numbers in zip(self._rows, self._on_host.tolist(), strict=True):
            if is_finite[row]:
                outcomes[row] = _read(numbers, token_ids[row], num_top)
        return outcomes


def queue_logprobs(
    logits: Tensor,
    vocab_size: int,
    rows: Sequence[SamplingRow],
    token_ids: Tensor,
    scored_rows: Tensor,
    accelerator: Accelerator,
) -> QueuedLogprobs:
    """Queue the log-probabilities of scored_rows, the rows that request them, from the first vocab_size columns of
    logits [R, ...] and from token_ids [R]; all of these are on the device.

    The results are those of `Sampler.sample` except for float32 rounding: each from its row alone, the best by
    descending logit, then by id.
    """
    requested = [(row, params.logprobs) for row, params in enumerate(each.params for each in rows)]
    wanted = [(row, min(num_top, vocab_size)) for row, num_top in requested if num_top is not None]
    num_best = max(num_top for _, num_top in wanted)
    columns, chunks = logits[:, :vocab_size], scored_rows.split(ROWS_PER_CHUNK)
    scores = torch.cat(
        [_score(columns.index_select(0, ids).float(), token_ids.index_select(0, ids), num_best) for ids in chunks]
    )
    on_host = accelerator.host_buffer(scores.numel() * scores.itemsize).view(scores.dtype).view(scores.shape)
    accelerator.copy_back(scores, on_host)
    return QueuedLogprobs(wanted, on_host)


def prompt_logprobs(
    logits: Tensor, vocab_size: int, target_token_ids: Sequence[int], num_top: int
) -> list[TokenLogprob]:
    """See `Sampler.prompt_logprobs`; the same except for float32 rounding. Waits for the results."""
    targets = upload_ids(target_token_ids, logits.device)
    num_best = min(num_top, vocab_size)
    chunks = zip(logits[:, :vocab_size].split(ROWS_PER_CHUNK), targets.split(ROWS_PER_CHUNK), strict=True)
    scores = torch.cat([_score(raw.float(), token_ids, num_best) for raw, token_ids in chunks])
    return [
        _read(numbers, token_id, num_best) for numbers, token_id in zip(scores.tolist(), target_token_ids, strict=True)
    ]


def _score(raw: Tensor, token_ids: Tensor, num_best: int) -> Tensor:
    """float64 [n, 3 + 2 num_best] from float32 [n, V]: see `QueuedLogprobs`. The log is NaN if a row is not finite."""
    chosen = raw.gather(1, token_ids[:, None])
    peaks = raw.amax(1, keepdim=True)
    totals = (raw - peaks).exp_().sum(1, keepdim=True, dtype=torch.float64)
    ranks = 1 + (raw > chosen).sum(1, keepdim=True)
    best_ids = _best(raw, num_best)
    columns = [chosen, peaks.double() + totals.log(), ranks, best_ids, raw.gather(1, best_ids)]
    return torch.cat([column.double() for column in columns], dim=1)


def _read(numbers: Sequence[float], token_id: int, num_top: int) -> TokenLogprob:
    """From a row of `_score`; NaN and none of the best if it is not finite."""
    logit, log_total, rank, *best = numbers
    if isnan(log_total):
        return TokenLogprob(token_id, nan, 1, [])
    half = len(best) // 2
    tops = zip(best[:half], best[half:], strict=True)
    listed = [(int(best_id), value - log_total) for best_id, value in tops][:num_top]
    return TokenLogprob(token_id, logit - log_total, int(rank), listed)


def _best(raw: Tensor, num_best: int) -> Tensor:
    """int64 [n, num_best]: ids of the largest logits, equal ones by ascending id, which `topk` does not guarantee."""
    bits = (raw + 0).view(torch.int32)  # + 0 makes -0 equal to 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(raw.shape[1], device=raw.device)
    keys = (ordered.long() << 32) | (_LOW_BITS - ids)
    return _LOW_BITS - (keys.topk(num_best, dim=1).values & _LOW_BITS)
