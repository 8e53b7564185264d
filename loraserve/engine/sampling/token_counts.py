"""How often each sequence with penalties has each token, counted on the device that chooses the tokens."""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from loraserve_kernels.logit_edits import fill_token_counts

from loraserve.engine.sampling.row import CountPlace, SamplingRow


class TokenCounts:
    """One row of device memory per sequence. Rows are never given back: a sequence that needs one takes the least
    recently used row."""

    # NOTE: a row that changes hands is filled after the queued batches, so these still find and count their own tokens.

    def __init__(self, device: torch.device, vocab_size: int, num_rows: int) -> None:
        """num_rows: the most that a batch can have."""
        self.tensor = torch.zeros((num_rows, vocab_size), dtype=torch.int32, device=device)
        """`LogitEdits.token_counts`."""
        self._places: OrderedDict[int, CountPlace | None] = OrderedDict.fromkeys(range(num_rows))  # oldest use first

    def count_rows(self, rows: Sequence[SamplingRow]) -> list[int]:
        """The row that counts the outputs before each row's next token; -1 without penalties. Waits for nothing.

        The caller must count the tokens that are chosen; see `SamplesOnDevice.count_tokens`.
        """
        penalised = [row for row in rows if row.has_penalties]
        for row in penalised:
            if self._is_counted(row):
                self._places.move_to_end(_place(row).count_row)
        for row in penalised:
            if not self._is_counted(row):
                self._start(row)
        for row in penalised:
            _place(row).num_output_tokens += 1
        return [_place(row).count_row if row.has_penalties else -1 for row in rows]

    def _is_counted(self, row: SamplingRow) -> bool:
        assert row.edit_state is not None
        place = row.edit_state.place
        if place is None or self._places[place.count_row] is not place:
            return False
        return place.num_output_tokens == row.num_output_tokens

    def _start(self, row: SamplingRow) -> None:
        assert row.num_unknown_tokens == 0, "a sequence of the batch before has its row"
        assert row.edit_state is not None
        count_row, _ = self._places.popitem(last=False)
        fill_token_counts(self.tensor[count_row], row.prompt_token_ids, row.output_token_ids)
        row.edit_state.place = self._places[count_row] = CountPlace(count_row, len(row.output_token_ids))


def _place(row: SamplingRow) -> CountPlace:
    assert row.edit_state is not None
    assert row.edit_state.place is not None
    return row.edit_state.place
