"""How one API request spent its time, computed from the times of its choices."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class ChoiceTimes:
    """Times of one choice, on the monotonic clock; `queue_s` is a duration."""

    received_s: float
    queue_s: float = 0.0
    first_token_s: float | None = None
    last_token_s: float | None = None


@dataclass(frozen=True, slots=True)
class GenerationTimes:
    """None = that point was not reached yet."""

    queue_ms: float | None
    """In the engine, until first scheduled."""
    ttft_ms: float | None
    """Received to first token."""
    generation_ms: float | None
    """First to last token."""


@dataclass(frozen=True, slots=True)
class GenerationPhases:
    """Times of the request as a whole, on the monotonic clock; each is no earlier than the one before."""

    sent_s: float
    """When it was sent to the engine."""
    scheduled_s: float
    """When its first choice was scheduled."""
    first_token_s: float
    """First token of any choice."""
    last_token_s: float
    """Last token of all choices."""


def times_of(choices: Sequence[ChoiceTimes], received_s: float) -> GenerationTimes:
    tokens_s = _tokens_s(choices)
    if tokens_s is None:
        return GenerationTimes(None, None, None)
    first_s, last_s = tokens_s
    return GenerationTimes(
        queue_ms=max(choice.queue_s for choice in choices) * 1000,
        ttft_ms=(first_s - received_s) * 1000,
        generation_ms=(last_s - first_s) * 1000,
    )


def phases_of(choices: Sequence[ChoiceTimes], sent_s: float) -> GenerationPhases | None:
    """None before the first token: the start in the engine is known only from then on."""
    tokens_s = _tokens_s(choices)
    if tokens_s is None:
        return None
    first_s, last_s = tokens_s
    queue_s = min(choice.queue_s for choice in choices if choice.first_token_s is not None)
    return GenerationPhases(sent_s, min(sent_s + queue_s, first_s), first_s, last_s)


def _tokens_s(choices: Sequence[ChoiceTimes]) -> tuple[float, float] | None:
    """Times of the first and the last token."""
    first_s = min((choice.first_token_s for choice in choices if choice.first_token_s is not None), default=None)
    last_s = max((choice.last_token_s for choice in choices if choice.last_token_s is not None), default=None)
    return None if first_s is None or last_s is None else (first_s, last_s)
