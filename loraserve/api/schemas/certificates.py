"""/v1/adapters/{name}/versions/{version}/certificate."""

from enum import StrEnum

import msgspec


class CertificateState(StrEnum):
    PENDING = "pending"
    """Not measured yet."""
    DONE = "done"
    """The served model answers as PEFT does."""
    FAILED = "failed"
    """It differs by more than rounding explains."""
    SKIPPED = "skipped"
    """The reason says why; nothing is known."""


class CertificateView(msgspec.Struct, frozen=True, kw_only=True):
    """How far the served model's answers with a version are from PEFT's own, measured once beside the server."""

    state: CertificateState
    max_logit_difference: float | None
    """Between two log-probabilities of any token, over all positions; of a classifier, two numbers of the states
    that its head reads."""
    num_tokens: int | None
    """Positions at which the whole vocabulary, or the whole state, was compared."""
    reason: str | None
    """Of one that was skipped, failed or is still pending."""
    object: str = "certificate"
