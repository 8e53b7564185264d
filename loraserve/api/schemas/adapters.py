"""/v1/adapters: what is listed, shown and changed; and vLLM's endpoints for loading and unloading."""

import msgspec
from msgspec import UNSET, UnsetType

from loraserve.api.schemas.aliases import AliasItem
from loraserve.api.schemas.versions import VersionItem
from loraserve.control.adapters.queries import AdapterState
from loraserve.store.records import Tier


class LiveVersion(msgspec.Struct, frozen=True):
    """What the adapter's bare name means."""

    n: int
    digest: str
    """Hash of the content: equal digests are equal adapters."""
    created_at: float
    """Unix seconds."""


class PinItem(msgspec.Struct, frozen=True):
    tier: Tier
    until: float | None
    """Unix seconds; null = until it is taken off."""


class AdapterItem(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a list of adapters."""

    name: str
    """What requests give as `model`."""
    tenant: str
    """Its owner; "shared" for adapters that every tenant may use."""
    description: str
    tags: list[str]
    enabled: bool
    """Requests for a disabled adapter are refused."""
    status: AdapterState
    """ "empty": it has no version yet; "other_base": its live version was made for another base model than this
    server's; "draining": deleted, with requests that still run."""
    tier: Tier
    """Where the live version's bytes are: on disk, mapped by the engine ("host") or in its arena ("device")."""
    live: LiveVersion | None
    canary_version: int | None
    """The version that a share of the users of the bare name gets."""
    canary_weight_bp: int | None
    """That share, in hundredths of a percent."""
    num_versions: int
    """Without deleted ones."""
    size_bytes: int
    """Of the live version's files."""
    max_rank: int
    """Of the live version."""
    targets: list[str]
    """Kinds of modules that the live version adapts."""
    pin: PinItem | None
    created_at: float
    """Unix seconds."""
    updated_at: float
    """Unix seconds."""
    deleted_at: float | None
    """Unix seconds; it can be restored for 24 hours."""
    last_used_at: float | None
    """Unix seconds; null while it is not known."""
    requests_24h: int | None
    """Null while it is not known."""
    ttft_p95_ms: float | None
    """Time to first token over the last 24 hours; null while it is not known."""
    rev: int
    """Revision; as an ETag, what If-Match takes."""
    object: str = "adapter"


class AdapterList(msgspec.Struct, frozen=True):
    data: list[AdapterItem]
    next_cursor: str | None
    """Give it as `cursor` for the next page; null on the last one."""
    object: str = "list"


class AdapterDetail(AdapterItem, frozen=True, kw_only=True):
    """All of one adapter."""

    aliases: list[AliasItem]
    """ "live" first, then by name."""
    versions: list[VersionItem]
    """Newest first, without deleted ones."""


class PatchAdapterRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Only what is given changes."""

    description: str | UnsetType = UNSET
    tags: list[str] | UnsetType = UNSET
    enabled: bool | UnsetType = UNSET


class PinRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keep the live version in memory."""

    tier: Tier
    """ "host" or "device"."""
    ttl_s: int | None = 3600
    """Seconds, at most 30 days; null = until it is taken off."""


class LoadLoraAdapterRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    lora_name: str
    lora_path: str
    load_inplace: bool = False
    """Replace an adapter of the same name."""
    is_3d_lora_weight: bool | None = None
    """vLLM's; nothing depends on it here, as the tensors say whether they are of single experts."""
    base_model_name: str | None = None
    """Empty, or a name of the served base model; its owner and how weights are stored do not count."""


class UnloadLoraAdapterRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    lora_name: str
    lora_int_id: int | None = None
    """Accepted; names are what we go by."""
