"""/v1/keys."""

import msgspec
from msgspec import UNSET, UnsetType

from loraserve.store.records import Limits, Role, Status


class KeyItem(msgspec.Struct, frozen=True, kw_only=True):
    """An API key without its secret, which cannot be shown again."""

    id: str
    name: str
    tenant: str
    """ "*" = a key for all tenants: X-Tenant says for which one it acts."""
    role: Role
    adapters: list[str] | None
    """The only adapters it may use; null = all of its tenant's and the shared ones."""
    limits: Limits
    status: Status
    is_expired: bool
    created_at: float
    """Unix seconds."""
    expires_at: float | None
    """Unix seconds."""
    rotating_until: float | None
    """Until then the key before the last rotation works too; Unix seconds."""
    rev: int
    """Revision; as an ETag, what If-Match takes."""
    object: str = "key"


class KeyList(msgspec.Struct, frozen=True):
    data: list[KeyItem]
    next_cursor: str | None
    object: str = "list"


class CreatedKey(KeyItem, frozen=True, kw_only=True):
    secret: str | None
    """The whole key as clients send it, shown this once; null when a request is replayed by its Idempotency-Key."""


class CreateKeyRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    role: Role
    tenant: str | None = None
    """Left out: the tenant that you act for."""
    name: str = ""
    """For people."""
    adapters: list[str] | None = None
    limits: Limits = Limits()
    expires_in_s: int | None = None
    """Seconds from now; left out = never."""


class PatchKeyRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Only what is given changes; `limits` as a whole."""

    name: str | UnsetType = UNSET
    role: Role | UnsetType = UNSET
    adapters: list[str] | UnsetType | None = UNSET
    limits: Limits | UnsetType = UNSET
    status: Status | UnsetType = UNSET
    """ "active" or "suspended"; to revoke for good, DELETE."""
    expires_at: float | UnsetType | None = UNSET
    """Unix seconds; null = never."""


class RotateKeyRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    grace_s: int = 3600
    """How long the old secret goes on working; 0 = it ends at once."""
