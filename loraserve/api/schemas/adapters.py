"""/v1/adapters: lists, details and changes; and vLLM's endpoints for loading and unloading."""

import msgspec
from msgspec import UNSET, UnsetType

from loraserve.api.schemas.aliases import AliasItem
from loraserve.api.schemas.versions import VersionItem
from loraserve.control.adapters.queries import AdapterState
from loraserve.store.records import Tier


class LiveVersion(msgspec.Struct, frozen=True):
    """The version that the adapter's bare name refers to."""

    n: int
    """Version number, as in `name@v3`."""
    digest: str
    """Hash of the content: versions with equal digests are the same adapter."""
    created_at: float
    """Unix seconds."""


class PinItem(msgspec.Struct, frozen=True):
    """A pin: the server keeps the live version in this memory tier."""

    tier: Tier
    """ "host" or "device"."""
    until: float | None
    """Unix seconds; null = until the pin is removed."""


class AdapterItem(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter, as in lists."""

    name: str
    """Sent as `model` in requests."""
    tenant: str
    """The tenant that owns it; "shared" for an adapter that every tenant may use."""
    description: str
    tags: list[str]
    enabled: bool
    """Requests to a disabled adapter are refused (403)."""
    status: AdapterState
    """ "ready"; "disabled"; "empty": no version yet; "other_base": the live version was made for a base model other
    than this server's; "draining": deleted, but requests still run or an engine still has it; "deleted"."""
    tier: Tier
    """Where the live version's bytes are: on disk ("disk"), mapped by the engine ("host") or in the engine's arena
    ("device")."""
    live: LiveVersion | None
    """Null if the adapter has no version."""
    canary_version: int | None
    """The version that a share of the users of the bare name gets; null = no canary."""
    canary_weight_bp: int | None
    """That share in hundredths of a percent, 0 to 10,000."""
    num_versions: int
    """Number of versions, not counting deleted ones."""
    size_bytes: int
    """Size of the live version's files."""
    max_rank: int
    """Largest LoRA rank of the live version."""
    targets: list[str]
    """Module kinds that the live version adapts, such as "q_proj"."""
    pin: PinItem | None
    created_at: float
    """Unix seconds."""
    updated_at: float
    """Unix seconds."""
    deleted_at: float | None
    """Unix seconds; null = not deleted. A deleted adapter can be restored for 24 hours."""
    last_used_at: float | None
    """Unix seconds; null = not used in the last 24 hours, or unknown. After a use on another server, or before
    this server started, the start of that hour."""
    requests_24h: int | None
    """Requests in the last 24 hours; null if unknown."""
    ttft_p95_ms: float | None
    """95th percentile of the time to first token over the last 24 hours, in milliseconds; null if unknown."""
    rev: int
    """Revision of the document. Send it as an ETag in If-Match."""
    object: str = "adapter"


class AdapterList(msgspec.Struct, frozen=True):
    data: list[AdapterItem]
    next_cursor: str | None
    """Send it as `cursor` to get the next page; null on the last page."""
    object: str = "list"


class AdapterDetail(AdapterItem, frozen=True, kw_only=True):
    """An adapter with its aliases and versions."""

    aliases: list[AliasItem]
    """ "live" first, then by name."""
    versions: list[VersionItem]
    """Newest first, without deleted ones."""


class PatchAdapterRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Changes only the fields that are sent."""

    description: str | UnsetType = UNSET
    """At most 2,000 characters."""
    tags: list[str] | UnsetType = UNSET
    """At most 32 tags of 1 to 64 printable characters each. Replaces all tags."""
    enabled: bool | UnsetType = UNSET
    """False: requests to the adapter are refused."""


class PinRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keeps the live version in memory."""

    tier: Tier
    """ "host" or "device"."""
    ttl_s: int | None = 3600
    """Seconds, 1 to 2,592,000 (30 days). Default: 3600; null = until the pin is removed."""


class LoadLoraAdapterRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    lora_name: str
    """Name of the adapter to create or replace."""
    lora_path: str
    """Folder with the adapter's files, on the server's machine."""
    load_inplace: bool = False
    """True: replace an adapter of the same name. False (the default): refuse the request if there is one."""
    is_3d_lora_weight: bool | None = None
    """A vLLM field. Without effect: the tensors themselves show whether they belong to single experts."""
    base_model_name: str | None = None
    """Empty, or a name of the served base model. The comparison ignores the name's owner and the format of the
    weights."""


class UnloadLoraAdapterRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    lora_name: str
    lora_int_id: int | None = None
    """Without effect: adapters are identified by name."""
