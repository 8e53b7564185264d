"""A step that is queued, and whose its tokens are."""

from dataclasses import dataclass

from loraserve.engine.device_sampler import QueuedTokens
from loraserve.engine.sampler import Sampled
from loraserve.engine.sequence import Sequence, Status


@dataclass(slots=True)
class StepInFlight:
    """A sequence that has ended since gets no token."""

    sequences: list[Sequence]
    """Of the sampled rows."""
    sampled: Sampled | QueuedTokens
    num_rows: int
    """Tokens that it computes."""

    @property
    def is_wanted(self) -> bool:
        """Whether any of its tokens is still for somebody."""
        return any(sequence.status is Status.RUNNING for sequence in self.sequences)

    def wait(self) -> Sampled:
        """Its tokens, as soon as they are here."""
        if isinstance(self.sampled, Sampled):
            return self.sampled
        return Sampled.collect(self.sampled)
