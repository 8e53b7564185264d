"""Tokens and their log-probabilities, chosen and computed for a host that waits for them."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from loraserve_kernels.argmax import BestTokens, argmax_reference
from loraserve_kernels.draw import Draw, draw_reference
from loraserve_kernels.edited_draw import EditedDraw, edited_draw_reference
from loraserve_kernels.score import Ask, Score, score_reference


class SamplesOnHost(Protocol):
    """Of logits [R, at least num_columns], rows may be strided; columns beyond num_columns are never read.

    Logits are not written to. A result depends on its row's logits and what is asked of that row only, bit for bit.
    """

    def argmax(self, logits: Tensor, num_columns: int) -> BestTokens:
        """Per row the lowest index of the largest among the first columns, and whether that element is finite.

        NaN counts as the largest.
        """
        ...

    def draw(self, logits: Tensor, num_columns: int, draws: Sequence[Draw]) -> list[int]:
        """A token for each draw, as `sampling.sample_reference` but for rounding; -1 where its row is not finite."""
        ...

    def draw_edited(self, logits: Tensor, num_columns: int, draws: Sequence[EditedDraw]) -> list[int]:
        """As `draw`, from logits that are edited first; -1 too where a row allows no token there is.

        Token ids from num_columns on are passed over. A row that allows only some tokens and is not finite elsewhere
        may get one all the same.
        """
        ...

    def score(self, logits: Tensor, num_columns: int, asks: Sequence[Ask]) -> list[Score]:
        """Log-probabilities, as `score_reference` but for rounding."""
        ...


class ReferenceSampling:
    """Implements `SamplesOnHost` in plain torch, on any device; a GPU is waited for."""

    def argmax(self, logits: Tensor, num_columns: int) -> BestTokens:
        """See `SamplesOnHost.argmax`."""
        return argmax_reference(logits, num_columns)

    def draw(self, logits: Tensor, num_columns: int, draws: Sequence[Draw]) -> list[int]:
        """See `SamplesOnHost.draw`."""
        return draw_reference(logits, num_columns, draws)

    def draw_edited(self, logits: Tensor, num_columns: int, draws: Sequence[EditedDraw]) -> list[int]:
        """See `SamplesOnHost.draw_edited`."""
        return edited_draw_reference(logits, num_columns, draws)

    def score(self, logits: Tensor, num_columns: int, asks: Sequence[Ask]) -> list[Score]:
        """See `SamplesOnHost.score`."""
        return score_reference(logits, num_columns, asks)
