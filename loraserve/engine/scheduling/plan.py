"""What one step computes, as the scheduler decides it."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from loraserve.engine.request import BegunPrompt
from loraserve.engine.scheduling.sequence import Sequence


@dataclass(slots=True)
class ScheduledSequence:
    """Compute `num_rows` tokens from `sequence.num_computed_tokens` on."""

    sequence: Sequence
    num_rows: int
    num_sampled_rows: int
    """Of the last rows: 1 when a token is to be sampled, more for prompt logprobs and drafts, 0 in the middle of a
    prompt."""
    num_pooled_rows: int = 0
    """Of the last rows: of a prompt that is pooled, those whose hidden states count."""
    num_base_rows: int = 0
    """Of the first rows: those that the sequence's adapter, an activated LoRA, does not reach."""
    draft: Seq[int] = ()
    """Tokens of the last rows that are not the sequence's yet: a guess, to be compared with what is chosen."""
    draft_masks: Seq[NDArray[np.uint8]] = ()
    """Of what may come after each of these, where the sequence has a grammar."""
    is_predicted: bool = False
    """Whether the request predicts the draft."""


@dataclass(slots=True)
class StepPlan:
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    """Ordered by adapter slot."""
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    """(source, destination), to be done in order before the forward pass."""
    begun: list[BegunPrompt] = field(default_factory=list)
    """Prompts that this step is the first to compute a part of."""
    failed: list[tuple[Sequence, str]] = field(default_factory=list)
    """Sequences whose adapter could not be loaded, and why; they hold nothing."""
