"""/v1/tenants."""

import msgspec
from msgspec import UNSET, UnsetType

from loraserve.control.documents.tenant_edits import TenantState
from loraserve.store.records import Limits, Status


class TenantItem(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    description: str
    status: TenantState
    """ "active"; "suspended", whose requests are refused; "draining" or "deleted", which can be restored for 24 hours;
    "erased", of which only the id and the usage are left."""
    limits: Limits
    weight: float
    """Share of the engine relative to other tenants."""
    num_adapters: int
    adapter_bytes: int
    """Over all versions, deleted ones too while they are on the disk; what limits.max_adapter_bytes is about."""
    num_keys: int
    """Without revoked ones."""
    updated_at: float
    """Unix seconds."""
    deleted_at: float | None
    """Unix seconds."""
    erased_at: float | None
    """Unix seconds."""
    rev: int
    """Revision; as an ETag, what If-Match takes."""
    object: str = "tenant"


class TenantList(msgspec.Struct, frozen=True):
    data: list[TenantItem]
    next_cursor: str | None
    object: str = "list"


class CreateTenantRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    id: str
    """Lower-case letters, digits and hyphens."""
    description: str = ""
    limits: Limits = Limits()
    weight: float = 1.0


class PatchTenantRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Only what is given changes; `limits` as a whole."""

    description: str | UnsetType = UNSET
    status: Status | UnsetType = UNSET
    """ "active" or "suspended"."""
    limits: Limits | UnsetType = UNSET
    weight: float | UnsetType = UNSET
