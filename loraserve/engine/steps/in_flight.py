"""A queued step, and the sequences its tokens belong to."""

from dataclasses import dataclass

from loraserve.engine.sampling.device_sampler import QueuedTokens
from loraserve.engine.sampling.sampler import Sampled
from loraserve.engine.scheduling.plan import ScheduledSequence
from loraserve.engine.scheduling.sequence import Sequence, Status
from loraserve.engine.steps.pooling import PooledPrompt


@dataclass(slots=True)
class StepInFlight:
    """A sequence that has ended in the meantime gets no token."""

    scheduled: list[ScheduledSequence]
    """What the step computes."""
    sequences: list[Sequence]
    """The sequences that get the tokens, in order: each its next token, and one more after each drafted token."""
    items: list[ScheduledSequence]
    """What each of these sequences was scheduled as."""
    sampled: Sampled | QueuedTokens
    pooled: list[PooledPrompt]
    takes_best: bool = False
    """Nothing is drafted or pooled, and each token is the best of its row, without log-probabilities."""

    @property
    def num_rows(self) -> int:
        return sum(item.num_rows for item in self.scheduled)

    @property
    def is_wanted(self) -> bool:
        """Whether a sequence still needs it: a prompt whose first choice was aborted is needed by the other choices."""
        sequences = [*self.sequences, *(item.sequence for item in self.scheduled)]
        return any(sequence.status is Status.RUNNING for sequence in sequences)

    @property
    def is_awaited(self) -> bool:
        """Whether the next step needs to know its tokens: a grammar's next mask depends on them."""
        return any(each.matcher is not None and each.matcher.is_awaited for each in self.sequences)

    def wait(self) -> Sampled:
        """Wait for its tokens."""
        if isinstance(self.sampled, Sampled):
            return self.sampled
        return Sampled.collect(self.sampled)
