"""Measurements since the last `take`, for charts."""

from collections import Counter
from dataclasses import dataclass, field

from loraserve.serving.telemetry.latency_histogram import bucket_of


@dataclass(slots=True)
class LatencyTotals:
    """Called on the event loop; 0.4 µs per token."""

    ttft: Counter[int] = field(default_factory=Counter)
    """Number of choices by bucket."""
    itl: Counter[int] = field(default_factory=Counter)
    num_errors: int = 0
    """Responses with 5xx, and streams that ended with such an error."""

    def first_token(self, ttft_s: float) -> None:
        self.ttft[bucket_of(ttft_s * 1000)] += 1

    def next_token(self, gap_s: float) -> None:
        self.itl[bucket_of(gap_s * 1000)] += 1

    def take(self) -> "LatencyTotals":
        """Returns the totals and resets all counts to zero."""
        taken = LatencyTotals(self.ttft, self.itl, self.num_errors)
        self.ttft, self.itl, self.num_errors = Counter(), Counter(), 0
        return taken
