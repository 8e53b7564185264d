"""/v1/adapters/{name}/aliases and /rollback."""

import msgspec


class CanaryItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    weight_bp: int
    """Share of users in hundredths of a percent, 0 to 10,000. A user stays in while the weight is raised."""


class AliasItem(msgspec.Struct, frozen=True, kw_only=True):
    """A name for a version: `adapter@alias`. The alias "live" is what the bare name means."""

    alias: str
    version: int
    previous: int | None
    """What a rollback goes back to."""
    canary: CanaryItem | None
    moved_at: float
    """Unix seconds."""
    object: str = "adapter.alias"


class PutAliasRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    canary: CanaryItem | None = None
    """Left out or null: everybody gets `version`."""


class RollbackRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    alias: str = "live"
