"""/v1/tenants."""

import msgspec
from msgspec import UNSET, UnsetType

from loraserve.control.documents.tenant_edits import TenantState
from loraserve.store.records import Limits, Status


class TenantItem(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    description: str
    status: TenantState
    """ "active"; "suspended": its requests are refused; "draining" or "deleted": can be restored for 24 hours;
    "erased": only its id and its usage are left."""
    limits: Limits
    weight: float
    """Share of the engine relative to other tenants."""
    num_adapters: int
    """Number of adapters."""
    adapter_bytes: int
    """Size of all versions, including deleted ones that are still on disk. Limited by `limits.max_adapter_bytes`."""
    num_keys: int
    """Number of keys, not counting revoked ones."""
    updated_at: float
    """Unix seconds."""
    deleted_at: float | None
    """Unix seconds; null = not deleted."""
    erased_at: float | None
    """Unix seconds; null = not erased."""
    rev: int
    """Revision of the document. Send it as an ETag in If-Match."""
    object: str = "tenant"


class TenantList(msgspec.Struct, frozen=True):
    data: list[TenantItem]
    next_cursor: str | None
    """Send it as `cursor` to get the next page; null on the last page."""
    object: str = "list"


class CreateTenantRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    id: str
    """1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit. An id is never given twice."""
    description: str = ""
    """At most 2,000 characters."""
    limits: Limits = Limits()
    """Default: none."""
    weight: float = 1.0
    """Share of the engine relative to other tenants: more than 0, at most 1000. Default: 1."""


class PatchTenantRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Changes only the fields that are sent; `limits` is replaced as a whole."""

    description: str | UnsetType = UNSET
    """At most 2,000 characters."""
    status: Status | UnsetType = UNSET
    """ "active" or "suspended"."""
    limits: Limits | UnsetType = UNSET
    weight: float | UnsetType = UNSET
    """Share of the engine relative to other tenants: more than 0, at most 1000."""
