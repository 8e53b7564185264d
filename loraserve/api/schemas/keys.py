"""/v1/keys."""

import msgspec
from msgspec import UNSET, UnsetType

from loraserve.store.records import Limits, Role, Status


class KeyItem(msgspec.Struct, frozen=True, kw_only=True):
    """An API key without its secret, which cannot be shown again."""

    id: str
    name: str
    """Display name."""
    tenant: str
    """ "*" = a key for all tenants: the header `X-Tenant` selects the one it acts for."""
    role: Role
    adapters: list[str] | None
    """The only adapters that it may use; null = all of its tenant's and the shared ones."""
    limits: Limits
    status: Status
    """ "active", "suspended" or "revoked"."""
    is_expired: bool
    created_at: float
    """Unix seconds."""
    expires_at: float | None
    """Unix seconds; null = never."""
    rotating_until: float | None
    """Unix seconds until which the secret before the last rotation also works; null = there is none."""
    rev: int
    """Revision of the document. Send it as an ETag in If-Match."""
    object: str = "key"


class KeyList(msgspec.Struct, frozen=True):
    data: list[KeyItem]
    next_cursor: str | None
    """Send it as `cursor` to get the next page; null on the last page."""
    object: str = "list"


class CreatedKey(KeyItem, frozen=True, kw_only=True):
    """A key with its new secret."""

    secret: str | None
    """The whole key as clients send it, shown only once; null if the request repeats an earlier one with the same
    Idempotency-Key."""


class CreateKeyRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    role: Role
    tenant: str | None = None
    """Left out: the tenant that you act for. "*": all tenants."""
    name: str = ""
    """Display name, at most 200 characters."""
    adapters: list[str] | None = None
    """Names of the only adapters that it may use, at most 1,000. Left out or null: all of its tenant's and the shared
    ones."""
    limits: Limits = Limits()
    """Default: none. `max_adapters` and `max_adapter_bytes` are for tenants only."""
    expires_in_s: int | None = None
    """Seconds from now until it expires, at most 3,153,600,000 (100 years). Left out or null: never."""


class PatchKeyRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Changes only the fields that are sent; `limits` is replaced as a whole."""

    name: str | UnsetType = UNSET
    """Display name, at most 200 characters."""
    role: Role | UnsetType = UNSET
    adapters: list[str] | UnsetType | None = UNSET
    """At most 1,000 names; null = all of the tenant's adapters and the shared ones."""
    limits: Limits | UnsetType = UNSET
    status: Status | UnsetType = UNSET
    """ "active" or "suspended". To revoke a key for good, use DELETE."""
    expires_at: float | UnsetType | None = UNSET
    """Unix seconds, in the future and at most 100 years ahead; null = never."""


class RotateKeyRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    grace_s: int = 3600
    """Seconds that the old secret keeps working, 0 to 2,592,000 (30 days); 0 = it stops at once. Default: 3600."""
