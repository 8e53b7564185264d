"""What one step computes, as the scheduler decides it."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from loraserve.engine.request import BegunPrompt
from loraserve.engine.scheduling.sequence import Sequence


@dataclass(slots=True)
class ScheduledSequence:
    """Compute `num_rows` tokens, starting at `sequence.num_computed_tokens`."""

    sequence: Sequence
    num_rows: int
    num_sampled_rows: int
    """How many of the last rows are sampled: 1 when a token is to be sampled, more for prompt logprobs and drafts, 0 in
    the middle of a prompt."""
    num_pooled_rows: int = 0
    """How many of the last rows have hidden states that count, if the prompt is pooled."""
    num_base_rows: int = 0
    """How many of the first rows the sequence's adapter, an activated LoRA, does not affect."""
    draft: Seq[int] = ()
    """Guessed tokens of the last rows, not yet the sequence's; they are compared with the tokens that the model
    chooses."""
    draft_masks: Seq[NDArray[np.uint8] | None] = ()
    """The mask of the tokens that may follow each drafted token, if the sequence has a matcher; None = all may."""
    save_slot: int = -1
    """Where the recurrent state after some of the rows is saved; -1 = nowhere."""
    num_rows_saved: int = 0
    """After how many of the rows."""
    is_predicted: bool = False
    """Whether the draft comes from the request's prediction."""


@dataclass(slots=True)
class StepPlan:
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    """Ordered by adapter slot."""
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    """(source, destination) pairs, to be copied in order before the forward pass."""
    state_copies: list[tuple[int, int]] = field(default_factory=list)
    """The same for slots of recurrent states."""
    begun: list[BegunPrompt] = field(default_factory=list)
    """Prompts whose computation starts with this step."""
    failed: list[tuple[Sequence, str]] = field(default_factory=list)
    """Sequences whose adapter could not be loaded, and why; they hold nothing."""
