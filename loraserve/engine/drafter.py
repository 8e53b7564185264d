"""Gives steps that only decode, and few sequences, drafts of what these say next."""

from collections.abc import Sequence as Seq

from loraserve.engine.batch_builder import ScheduledSequence
from loraserve.engine.draft import Draft
from loraserve.engine.endings import Endings
from loraserve.engine.scheduler import Scheduler

TRUSTED_ROWS = 2
"""Rows of a step, as a multiple of those that are free, that are worth what they cost where the last draft was right.
Measured with AVX-512, 100 M parameters, 8 rows free: 8 sequences with a right token each, 16 rows, are 1.4 times as
fast, 4 sequences with three each 2.9 times, with one each (8 rows) 1.8 times. 16 sequences gain 1.3 times by 32 rows,
and lose a third where these are wrong."""


class Drafter:
    """Speculative decoding: tokens are chosen as without it, several in one step where a draft was right."""

    def __init__(
        self, scheduler: Scheduler, endings: Endings, *, max_length: int, num_free_rows: int, max_num_rows: int
    ) -> None:
        """max_length: of a draft. num_free_rows: of a step, drafts included, that cost next to nothing. max_num_rows:
        of any step."""
        self._scheduler = scheduler
        self._endings = endings
        self._max_length = max_length
        self._max_num_rows = min(num_free_rows, max_num_rows)
        self._max_trusted_rows = min(TRUSTED_ROWS * num_free_rows, max_num_rows)
        self.num_tokens = 0
        """Drafted."""

    def add_drafts(self, scheduled: Seq[ScheduledSequence]) -> None:
        """Make items of a step longer if all of them only go on: rows are dealt evenly."""
        num_rows = sum(item.num_rows for item in scheduled)
        if num_rows >= self._max_trusted_rows or not all(_goes_on(item) for item in scheduled):
            return
        for num_to_come, item in zip(range(len(scheduled), 0, -1), scheduled, strict=True):
            share = _share(self._max_num_rows - num_rows, num_to_come)
            num_rows += self._add_draft(item, share, _share(self._max_trusted_rows - num_rows, num_to_come))

    def _add_draft(self, item: ScheduledSequence, max_length: int, max_trusted_length: int) -> int:
        """Returns how long it is. The lengths are as `Draft.next` has them."""
        sequence = item.sequence
        num_left = self._endings.num_left(sequence) - 1
        if sequence.draft is None:
            predicted = sequence.request.predicted_token_ids
            sequence.draft = Draft(self._max_length, sequence.num_prompt_tokens, predicted)
        draft = sequence.draft.next(sequence.token_ids, min(max_length, num_left), min(max_trusted_length, num_left))
        if draft and sequence.matcher is not None:
            item.draft_masks = sequence.matcher.masks_after(draft)
            draft = draft[: len(item.draft_masks)]
        if not draft or not self._scheduler.try_lengthen(item, len(draft)):
            item.draft_masks = []
            return 0
        item.draft = draft
        sequence.num_draft_tokens += len(draft)
        self.num_tokens += len(draft)
        return len(draft)


def _goes_on(item: ScheduledSequence) -> bool:
    """Whether its next token is chosen, and is not the first one."""
    return item.num_sampled_rows == 1 and item.sequence.state.is_forked


def _share(num_rows: int, num_sequences: int) -> int:
    return -(-max(num_rows, 0) // num_sequences)
