"""How a request ended, as it is counted, shown and billed."""

from dataclasses import dataclass

import msgspec

from loraserve.live.requests import EndState
from loraserve.store.usage_log import BilledOutcome


@dataclass(frozen=True, slots=True)
class Outcome:
    """All delivered tokens are billed, whatever the ending; tokens that a server fault left undelivered are not."""

    ending: EndState
    """Never LOST: nothing more is known of a lost request."""
    finish_reason: str
    """As in the answer: "stop", "length", "abort" or "error"."""
    num_prompt_tokens: int
    num_cached_tokens: int
    """Of the prompt's."""
    num_output_tokens: int
    queue_ms: float | None = None
    adapter_load_ms: float | None = None
    ttft_ms: float | None = None
    error_code: str | None = None


class RequestSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What Redis keeps of an ended request. Never a prompt or an answer."""

    key_id: str | None
    adapter: str | None
    """None = the base model."""
    adapter_tenant: str | None
    version: int | None
    route: str = ""
    stream: bool = False
    received_at: float = msgspec.field(name="admitted_at")
    """Unix time. The stored name is that of older releases, which may share the Redis."""
    duration_ms: float
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_ms: float | None = None
    adapter_load_ms: float | None = None
    ttft_ms: float | None = None
    error_code: str | None = None


def billed_outcome(outcome: Outcome) -> BilledOutcome:
    match outcome.ending:
        case EndState.COMPLETED:
            return BilledOutcome.LENGTH if outcome.finish_reason == "length" else BilledOutcome.STOP
        case EndState.ABORTED:
            return BilledOutcome.ABORTED
        case _:
            return BilledOutcome.ERROR
