"""/v1/adapters/{name}/aliases and /rollback."""

import msgspec


class CanaryItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A second version that a share of an alias's users gets."""

    version: int
    weight_bp: int
    """Share of users in hundredths of a percent, 0 to 10,000. A user in the canary stays in it while the weight is
    raised."""


class AliasItem(msgspec.Struct, frozen=True, kw_only=True):
    """A name for a version: `adapter@alias`. The adapter's bare name refers to the alias "live"."""

    alias: str
    version: int
    previous: int | None
    """The version that a rollback restores; null = none."""
    canary: CanaryItem | None
    """Null = every user gets `version`."""
    moved_at: float
    """Unix seconds."""
    object: str = "adapter.alias"


class PutAliasRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    """Number of the version that the alias refers to from now on."""
    canary: CanaryItem | None = None
    """Left out or null: every user gets `version`."""


class RollbackRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    alias: str = "live"
    """The alias to roll back. Default: "live"."""
