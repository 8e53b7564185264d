"""A queued step, and the sequences its tokens belong to."""

from dataclasses import dataclass, field

from loraserve.engine.batch_builder import ScheduledSequence
from loraserve.engine.device_sampler import QueuedTokens
from loraserve.engine.sampler import Sampled
from loraserve.engine.sequence import Sequence, Status


@dataclass(frozen=True, slots=True)
class DraftedToken:
    """A row that was computed as if this token were its sequence's."""

    num_tokens: int
    """The sequence's, with this one."""
    token_id: int

    def is_right(self, sequence: Sequence) -> bool:
        """Whether it is, and is the last one, so that the row's own token comes next."""
        return sequence.num_tokens == self.num_tokens and sequence.token_ids[-1] == self.token_id


@dataclass(slots=True)
class StepInFlight:
    """A sequence that has ended since gets no token."""

    scheduled: list[ScheduledSequence]
    """What it computes."""
    sequences: list[Sequence]
    """Who gets the tokens, in their order."""
    sampled: Sampled | QueuedTokens
    drafted: dict[int, DraftedToken] = field(default_factory=dict)
    """By the place of a row in `sequences`: the token that must have been chosen for its own token to be one."""

    @property
    def num_rows(self) -> int:
        return sum(item.num_rows for item in self.scheduled)

    @property
    def is_wanted(self) -> bool:
        """Whether what it computes is still for somebody: a prompt whose first choice was aborted is its others'."""
        sequences = [*self.sequences, *(item.sequence for item in self.scheduled)]
        return any(sequence.status is Status.RUNNING for sequence in sequences)

    @property
    def is_awaited(self) -> bool:
        """Whether the next step needs to know its tokens: a grammar's next mask depends on them."""
        return any(sequence.matcher is not None for sequence in self.sequences)

    def wait(self) -> Sampled:
        """Its tokens, as soon as they are here."""
        if isinstance(self.sampled, Sampled):
            return self.sampled
        return Sampled.collect(self.sampled)
