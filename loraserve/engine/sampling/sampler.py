"""From one engine step's logits to one token per row."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loraserve_kernels.argmax import BestTokens
from loraserve_kernels.draw import Draw
from loraserve_kernels.host_sampling import SamplesOnHost
from loraserve_kernels.score import ScoreQuery
from torch import Tensor

from loraserve.engine.request import TokenLogprob
from loraserve.engine.sampling.columns import DeviceSampling
from loraserve.engine.sampling.device_sampler import DeviceSampler, QueuedTokens
from loraserve.engine.sampling.logit_edits import edited_draw
from loraserve.engine.sampling.row import SamplingRow


@dataclass(slots=True)
class Sampled:
    """Aligned with the rows given to `Sampler.sample`."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]
    """None if the row requests none or is not finite."""
    is_finite: list[bool]
    """False: the row has NaN, +inf or nothing but -inf, or allows no token that exists; its token is undefined."""

    @classmethod
    def from_best(cls, best: BestTokens) -> "Sampled":
        """For rows that take these tokens and request nothing else."""
        token_ids, is_finite = best
        return cls(token_ids, [None] * len(token_ids), is_finite)

    @classmethod
    def collect(cls, queued: QueuedTokens) -> "Sampled":
        """Waits for the tokens."""
        token_ids, is_finite = queued.wait()
        return cls(token_ids, queued.logprobs(token_ids, is_finite), is_finite)


class Sampler:
    """Chooses tokens as vLLM's v1 sampler does, except for noise and ties.

    A row's result depends only on its own logits and `SamplingRow`, bit for bit: not on the batch or its place in it.
    Its noise is a function of (seed, position). Equal logits are ordered by ascending token id, so top_k keeps exactly
    k.

    Order: raw logprobs; allowed_token_ids, logit_bias, min_tokens, penalties (`logit_edits`); greedy stops here;
    temperature, min_p, top_k, top_p, draw: by the backend, see `loraserve_kernels.sampling`.

    A row whose edits leave every logit -inf gets the allowed token with the largest raw logit, even if it is banned.
    """

    def __init__(
        self, vocab_size: int, logits_size: int, host: SamplesOnHost, device: DeviceSampler | None = None
    ) -> None:
        """Logits have `logits_size` columns; those from `vocab_size` on are padding and never read.

        device: used if logits are on a GPU that can sample; else `host` is.
        """
        assert 0 < vocab_size <= logits_size, f"vocab_size {vocab_size} with {logits_size} columns of logits"
        self.vocab_size = vocab_size
        self.logits_size = logits_size
        self._host = host
        self._device = device

    def draws_of(self, rows: Iterable[tuple[int, SamplingRow]]) -> list[Draw]:
        """What `sample` will draw, for a model that can draw in its forward pass. rows: each with its logits' row.

        Empty if a token is drawn from edited logits, or if tokens are chosen on a device.
        """
        if self._device is not None:
            return []
        draws: list[Draw] = []
        for row_id, row in rows:
            if row.takes_argmax:
                continue
            if not row.draws_freely or row.is_below_min_tokens:
                return []
            draws.append(row.draw_from(row_id))
        return draws

    def sample(
        self,
        logits: Tensor,
        rows: Sequence[SamplingRow],
        best: BestTokens | None = None,
        drawn: list[int] | None = None,
    ) -> Sampled:
        """logits: [R, logits_size], float32, bfloat16 or float16, not written to.

        best: the result of `argmax` for them, if known. drawn: the tokens for `draws_of`, if known.
        """
        self._check(logits, len(rows))
        if not rows:
            return Sampled([], [], [])
        if self._device is not None:
            return Sampled.collect(self._device.queue(logits, rows))
        best_ids, are_finite = best or self._host.argmax(logits, self.vocab_size)
        if self._are_unedited(rows, best_ids):
            token_ids = self._draw_unedited(best_ids, logits, rows, drawn)
        else:
            token_ids, are_finite = self._draw_edited(logits, rows, best_ids, are_finite)
        return Sampled(token_ids, self._logprobs(logits, token_ids, are_finite, rows), are_finite)

    def try_queue(
        self, logits: Tensor, rows: Sequence[SamplingRow], sampling: DeviceSampling | None = None
    ) -> QueuedTokens | None:
        """`sample` without waiting for it; None if tokens are not chosen on a device.

        sampling: of the rows, if it is on the device already.
        """
        if self._device is None:
            return None
        self._check(logits, len(rows))
        return self._device.queue(logits, rows, sampling)

    def _are_unedited(self, rows: Sequence[SamplingRow], best_ids: list[int]) -> bool:
        """Whether each row takes its largest logit or is drawn from logits as they are."""
        if not all(row.takes_argmax or row.draws_freely for row in rows):
            return False
        return not any(row.has_bans(best_id) for row, best_id in zip(rows, best_ids, strict=True))

    def _draw_unedited(
        self, best_ids: list[int], logits: Tensor, rows: Sequence[SamplingRow], drawn: list[int] | None
    ) -> list[int]:
        """Each row's token: its best one if it takes that, else a drawn one."""
        row_ids = [index for index, row in enumerate(rows) if not row.takes_argmax]
        if not row_ids:
            return best_ids
        if drawn is None:
            drawn = self._host.draw(logits, self.vocab_size, [rows[row_id].draw_from(row_id) for row_id in row_ids])
        token_ids = list(best_ids)
        for row_id, token_id in zip(row_ids, drawn, strict=True):
            token_ids[row_id] = token_id
        return token_ids

    def _draw_edited(
        self, logits: Tensor, rows: Sequence[SamplingRow], best_ids: list[int], are_finite: list[bool]
    ) -> tuple[list[int], list[bool]]:
        """(The tokens, whether they are defined). One call for rows that are only drawn, one for edited rows."""
        token_ids, is_finite = list(best_ids), list(are_finite)
        finite = [(index, row) for index, row in enumerate(rows) if are_finite[index]]
        drawn = [row.draw_from(index) for index, row in finite if not row.is_greedy and not row.has_edits]
        if drawn:
            for each, token_id in zip(drawn, self._host.draw(logits, self.vocab_size, drawn), strict=True):
                token_ids[each.row] = token_id
        edited = [edited_draw(index, row, self.vocab_size) for index, row in finite if row.has_edits]
        for each, token_id in zip(edited, self._host.draw_edited(logits, self.vocab_size, edited), strict=True):
            token_ids[each.draw.row], is_finite[each.draw.row] = max(token_id, 0), token_id >= 0
        return token_ids, is_finite

    def prompt_logprobs(self, logits: Tensor, target_token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
        """Each row's raw logprob of its target and its `num_top` most likely tokens; NaN and none for a row not finite.

        logits: [P, logits_size]; row i predicts `target_token_ids[i]`, which is in the vocabulary.
        """
        self._check(logits, len(target_token_ids))
        if not target_token_ids:
            return []
        if self._device is not None:
            return self._device.prompt_logprobs(logits, target_token_ids, num_top)
        queries = [ScoreQuery(index, token_id, num_top) for index, token_id in enumerate(target_token_ids)]
        scores = self._host.score(logits, self.vocab_size, queries)
        return [TokenLogprob(query.token_id, *score) for query, score in zip(queries, scores, strict=True)]

    def _check(self, logits: Tensor, num_rows: int) -> None:
        expected = (num_rows, self.logits_size)
        assert logits.shape == expected, f"logits are {tuple(logits.shape)}, not {expected}"

    def _logprobs(
        self, logits: Tensor, token_ids: list[int], is_finite: list[bool], rows: Sequence[SamplingRow]
    ) -> list[TokenLogprob | None]:
        outcomes: list[TokenLogprob | None] = [None] * len(rows)
        queries = [
            ScoreQuery(index, token_ids[index], row.params.logprobs)
            for index, row in enumerate(rows)
            if row.params.logprobs is not None and is_finite[index]
        ]
        if queries:
            for query, score in zip(queries, self._host.score(logits, self.vocab_size, queries), strict=True):
                outcomes[query.row] = TokenLogprob(query.token_id, *score)
        return outcomes
