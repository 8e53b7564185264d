"""Tokens and log-probabilities, returned to the host, which waits for them."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from loraserve_kernels.argmax import BestTokens, argmax_reference
from loraserve_kernels.draw import Draw, draw_reference
from loraserve_kernels.edited_draw import EditedDraw, edited_draw_reference
from loraserve_kernels.score import Score, ScoreQuery, score_reference


class SamplesOnHost(Protocol):
    """For logits [R, at least num_columns], rows may be strided; columns from num_columns on are never read.

    Logits are not written to. A result depends only on its row's logits and parameters, bit for bit.
    """

    def argmax(self, logits: Tensor, num_columns: int) -> BestTokens:
        """Per row, the lowest index of the largest logit in the first num_columns, and whether that logit is finite.

        NaN counts as the largest.
        """
        ...

    def draw(self, logits: Tensor, num_columns: int, draws: Sequence[Draw]) -> list[int]:
        """A token per draw, as by `sampling.sample_reference` except for rounding; -1 if its row is not finite."""
        ...

    def draw_edited(self, logits: Tensor, num_columns: int, draws: Sequence[EditedDraw]) -> list[int]:
        """As `draw`, from logits that are edited first; -1 also if a row allows no existing token.

        Token ids from num_columns on are ignored. A row that allows only some tokens may get one even if the logits of
        other tokens make it not finite.
        """
        ...

    def score(self, logits: Tensor, num_columns: int, queries: Sequence[ScoreQuery]) -> list[Score]:
        """Log-probabilities, as by `score_reference` except for rounding."""
        ...


class ReferenceSampling:
    """Implements `SamplesOnHost` in plain torch, on any device; waits for a GPU."""

    def argmax(self, logits: Tensor, num_columns: int) -> BestTokens:
        """See `SamplesOnHost.argmax`."""
        return argmax_reference(logits, num_columns)

    def draw(self, logits: Tensor, num_columns: int, draws: Sequence[Draw]) -> list[int]:
        """See `SamplesOnHost.draw`."""
        return draw_reference(logits, num_columns, draws)

    def draw_edited(self, logits: Tensor, num_columns: int, draws: Sequence[EditedDraw]) -> list[int]:
        """See `SamplesOnHost.draw_edited`."""
        return edited_draw_reference(logits, num_columns, draws)

    def score(self, logits: Tensor, num_columns: int, queries: Sequence[ScoreQuery]) -> list[Score]:
        """See `SamplesOnHost.score`."""
        return score_reference(logits, num_columns, queries)
