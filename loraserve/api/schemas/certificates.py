"""/v1/adapters/{name}/versions/{version}/certificate."""

from enum import StrEnum

import msgspec


class CertificateState(StrEnum):
    PENDING = "pending"
    """Not measured yet."""
    DONE = "done"
    """The served model's answers agree with PEFT's."""
    FAILED = "failed"
    """They differ by more than rounding explains."""
    SKIPPED = "skipped"
    """Not measured, for the reason given; nothing is known."""


class CertificateView(msgspec.Struct, frozen=True, kw_only=True):
    """How far the served model's answers with a version differ from PEFT's, measured once in a background process."""

    state: CertificateState
    max_logit_difference: float | None
    """Largest difference between two log-probabilities of the same token, over all positions. For a classifier: between
    two numbers of the hidden states that its head reads."""
    num_tokens: int | None
    """Number of positions at which the whole vocabulary, or the whole hidden state, was compared."""
    reason: str | None
    """Why it was skipped, failed or is still pending; null if it is done."""
    object: str = "certificate"
