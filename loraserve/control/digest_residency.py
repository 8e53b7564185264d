"""How near one content is to this server's engine, and how much it is used."""

from dataclasses import dataclass

from loraserve.store.records import Tier


@dataclass(frozen=True, slots=True)
class DigestResidency:
    digest: str
    tier: Tier
    packed_bytes: int | None
    """None until this process loaded it."""
    last_used_at: float | None
    """Unix time; since the start of this process."""
    num_hits: int
    """Requests since the start of this process."""
    load_ms: float | None
    """What its last load took, with packing where that was needed."""
    num_references: int
    """Requests that use it now."""
