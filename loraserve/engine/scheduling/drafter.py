"""Adds drafts of the next tokens to small steps that only decode."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import ceil

from loraserve.engine.scheduling.draft import Draft
from loraserve.engine.scheduling.endings import Endings
from loraserve.engine.scheduling.plan import ScheduledSequence
from loraserve.engine.scheduling.scheduler import Scheduler

TRUSTED_ROWS = 2
"""Most rows of a step, as a multiple of the free rows, that are worth their cost if the last draft was correct.
Measured with AVX-512, 100 M parameters and 8 free rows: 8 sequences with one correct token each (16 rows) are 1.4 times
as fast, 4 sequences with three each 2.9 times, with one each (8 rows) 1.8 times. With 32 rows, 16 sequences are 1.3
times as fast, and 0.6 times if the drafts are wrong."""


@dataclass(frozen=True, slots=True)
class FreeRows:
    """The rows that a decode step computes in about the time that its memory reads take anyway."""

    num_rows: int
    """In total, with short contexts."""
    context_of_a_row: float
    """Tokens of context whose attention takes as long as the rest of a row."""

    def weight(self, context_len: int) -> float:
        """How many rows with a short context take as long as one row with this context."""
        return 1 + context_len / self.context_of_a_row


class Drafter:
    """Speculative decoding: chooses the same tokens as without it, several in one step if a draft was correct."""

    def __init__(
        self, scheduler: Scheduler, endings: Endings, *, max_length: int, free_rows: FreeRows, max_num_rows: int
    ) -> None:
        """max_length: longest draft. max_num_rows: most rows in any step."""
        self._scheduler = scheduler
        self._endings = endings
        self._max_length = max_length
        self._free_rows = free_rows
        self._max_num_rows = max_num_rows
        self._num_steps = 0
        self.num_tokens = 0
        """Total tokens drafted."""

    def add_drafts(self, scheduled: Seq[ScheduledSequence]) -> None:
        """Lengthen the items of a step by drafts if every item only decodes.

        Free rows are divided evenly. Other sequences would wait for any further rows, so only steps of a single tenant
        get them: for sequences whose last draft was correct, and one row for any sequence, in turn, so that drafts can
        become correct.
        """
        num_rows = sum(item.num_rows for item in scheduled)
        num_free = self._free_rows.num_rows
        is_small = 0 < num_rows < min(TRUSTED_ROWS * num_free, self._max_num_rows)
        if not is_small or not all(map(_is_decoding, scheduled)):
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
        """Returns the draft's length. For the limits, see `Draft.next`."""
        sequence = item.sequence
        if sequence.draft is None:
            predicted = sequence.request.predicted_token_ids
            sequence.draft = Draft(self._max_length, sequence.num_prompt_tokens, predicted)
        num_left = self._endings.num_left(sequence) - 1
        max_length, max_trusted_length = min(max_length, num_left), min(max_trusted_length, num_left)
        draft, is_predicted = sequence.draft.next(sequence.token_ids, max_length, max_trusted_length)
        masks = sequence.matcher.masks_after(draft) if draft and sequence.matcher is not None else ()
        if sequence.matcher is not None:
            draft = draft[: len(masks)]
        if not draft or not self._scheduler.try_lengthen(item, len(draft)):
            return 0
        sequence.draft.note_computed(draft, sequence.num_tokens)
        item.draft, item.draft_masks, item.is_predicted = draft, masks, is_predicted
        self.num_tokens += len(draft)
        return len(draft)


def _is_decoding(item: ScheduledSequence) -> bool:
    """Whether the step chooses a token for it that is not its first one."""
    return item.num_sampled_rows == 1 and item.sequence.state.is_forked
