"""Gives steps that only decode, and few sequences, drafts of what these say next."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import ceil

from loraserve.engine.scheduling.draft import Draft
from loraserve.engine.scheduling.endings import Endings
from loraserve.engine.scheduling.plan import ScheduledSequence
from loraserve.engine.scheduling.scheduler import Scheduler

TRUSTED_ROWS = 2
"""Rows of a step, as a multiple of those that are free, that are worth what they cost where the last draft was right.
Measured with AVX-512, 100 M parameters, 8 rows free: 8 sequences with a right token each, 16 rows, are 1.4 times as
fast, 4 sequences with three each 2.9 times, with one each (8 rows) 1.8 times. 16 sequences are 1.3 times as fast by
32 rows, and 0.6 times where these are wrong."""


@dataclass(frozen=True, slots=True)
class FreeRows:
    """What a decode step computes in about the time that it takes to read what it has to read."""

    num_rows: int
    """In all, of short contexts."""
    context_of_a_row: float
    """Tokens of context whose attention takes as long as the rest of a row."""

    def weight(self, context_len: int) -> float:
        """Rows of a short context that one of this context is as long as."""
        return 1 + context_len / self.context_of_a_row


class Drafter:
    """Speculative decoding: tokens are chosen as without it, several in one step where a draft was right."""

    def __init__(
        self, scheduler: Scheduler, endings: Endings, *, max_length: int, free_rows: FreeRows, max_num_rows: int
    ) -> None:
        """max_length: of a draft. max_num_rows: of any step."""
        self._scheduler = scheduler
        self._endings = endings
        self._max_length = max_length
        self._free_rows = free_rows
        self._max_num_rows = max_num_rows
        self._num_steps = 0
        self.num_tokens = 0
        """Drafted."""

    def add_drafts(self, scheduled: Seq[ScheduledSequence]) -> None:
        """Make items of a step longer if all of them only go on.

        Rows that are free are dealt evenly. More, which others would wait for, are dealt only in steps of one tenant:
        to sequences whose last draft was right, and one to any, in turn, so that there are some.
        """
        num_rows = sum(item.num_rows for item in scheduled)
        num_free = self._free_rows.num_rows
        is_small = 0 < num_rows < min(TRUSTED_ROWS * num_free, self._max_num_rows)
        if not is_small or not all(map(_goes_on, scheduled)):
            return
        is_of_one = len({item.sequence.request.tenant for item in scheduled}) == 1
        free = float(num_free - num_rows)
        trusted = free + (TRUSTED_ROWS - 1) * num_free if is_of_one else free
        self._num_steps += 1
        first = self._num_steps % len(scheduled)
        for num_before, item in enumerate([*scheduled[first:], *scheduled[:first]]):
            weight = self._free_rows.weight(item.sequence.num_tokens)
            length, trusted_length = (
                ceil(max(rows, 0) / weight / (len(scheduled) - num_before)) for rows in (free, trusted)
            )
            if num_before == 0 and is_of_one:
                length = max(length, 1)
            room = self._max_num_rows - num_rows
            num_drafted = self._add_draft(item, min(length, room), min(trusted_length, room))
            num_rows += num_drafted
            free, trusted = free - weight * num_drafted, trusted - weight * num_drafted

    def _add_draft(self, item: ScheduledSequence, max_length: int, max_trusted_length: int) -> int:
        """Returns how long it is. The lengths are as `Draft.next` has them."""
        sequence = item.sequence
        if sequence.draft is None:
            predicted = sequence.request.predicted_token_ids
            sequence.draft = Draft(self._max_length, sequence.num_prompt_tokens, predicted)
        num_left = self._endings.num_left(sequence) - 1
        max_length, max_trusted_length = min(max_length, num_left), min(max_trusted_length, num_left)
        draft, is_predicted = sequence.draft.next(sequence.token_ids, max_length, max_trusted_length)
        masks = []
        if draft and sequence.matcher is not None:
            masks = sequence.matcher.masks_after(draft)
            draft = draft[: len(masks)]
        if not draft or not self._scheduler.try_lengthen(item, len(draft)):
            return 0
        sequence.draft.note_computed(draft, sequence.num_tokens)
        item.draft, item.draft_masks, item.is_predicted = draft, masks, is_predicted
        self.num_tokens += len(draft)
        return len(draft)


def _goes_on(item: ScheduledSequence) -> bool:
    """Whether its next token is chosen, and is not the first one."""
    return item.num_sampled_rows == 1 and item.sequence.state.is_forked
