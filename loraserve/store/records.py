"""What a person declares: tenants, keys and adapters, as they are written to disk and mirrored in Redis."""

from enum import StrEnum
from typing import Generic, TypeVar

import msgspec


class DocumentKind(StrEnum):
    TENANT = "tenant"
    KEY = "key"
    ADAPTER = "adapter"


class Role(StrEnum):
    """What a key may do; each role may also do what the ones before it may, except that `viewer` may not infer."""

    INFER = "infer"
    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"


class Status(StrEnum):
    """Of a tenant or a key. Revoking a key is final, suspending is not."""

    ACTIVE = "active"
    SUSPENDED = "suspended"
    REVOKED = "revoked"


ANY_TENANT = "*"
"""The tenant of a key for all tenants (`X-Tenant` says for which one it acts)."""
DEFAULT_TENANT = "default"
"""Who an open server's requests belong to."""
SHARED_TENANT = "shared"
"""Its adapters are visible to every tenant."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """None = no limit; 0 refuses everything, of `max_queued` what would have to wait."""

    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    """Prompt and output tokens."""
    max_concurrent: int | None = None
    """Requests in flight."""
    max_queued: int | None = None
    """Sequences waiting in an engine."""
    max_adapters: int | None = None
    """Of a tenant; not of a key."""
    max_adapter_bytes: int | None = None
    """Of a tenant, over all versions, deleted ones too while they are on the disk; shared content counts in full."""


class TenantDoc(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """NOTE: fields with their defaults are not written, so that a release that knows no deletion can read all tenants
    that are not deleted."""

    status: Status = Status.ACTIVE
    description: str = ""
    limits: Limits = Limits()
    weight: float = 1.0
    """Share of the engine relative to other tenants."""
    kv_salt: str
    """Random; part of every prefix-cache hash, so that tenants share no blocks."""
    deleted_at: float | None = None
    """Unix time; restorable for 24 h. Its keys, adapters and uploads do not exist meanwhile, though nothing of them is
    changed: what a document of a tenant is worth is judged by its tenant's."""
    is_erasing: bool = False
    """For good: it cannot be restored, and what it had is being removed."""
    erased_at: float | None = None
    """Unix time: all of it is gone. This document stays, so that nobody else gets the id and with it the usage."""


class KeyDoc(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An API key `ls-<id>_<secret>`. Only the hash of the secret is kept."""

    tenant: str
    """`ANY_TENANT` of a key for all tenants."""
    role: Role
    name: str = ""
    """For people."""
    adapters: list[str] | None = None
    """Names it may use; None = all of the tenant's and the shared ones."""
    limits: Limits = Limits()
    sha256: str
    """Hex, of the whole key as the client sends it."""
    previous_sha256: str | None = None
    """Of the key before its rotation, which works until `previous_until`."""
    previous_until: float | None = None
    """Unix time."""
    expires_at: float | None = None
    """Unix time."""
    status: Status = Status.ACTIVE
    created_at: float


class BaseRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A base model that an adapter's content fits."""

    name: str
    """What it was called when the content was checked, for people."""
    fingerprint: str
    """Of its linears' names and shapes: what decides."""


class ClassifierRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a classifier's head gives numbers for."""

    num_labels: int
    labels: list[str] = []
    """Their names; empty = they have none."""
    problem_type: str | None = None
    """See `AdapterConfig`."""
    score_template: str | None = None
    """Likewise."""

    def name_of(self, label: int) -> str:
        """As transformers names those without a name."""
        return self.labels[label] if self.labels else f"LABEL_{label}"


class VersionRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One immutable content of an adapter.

    NOTE: fields with their defaults are not written, so that a release that knows no activated LoRA, no classifiers or
    no names of chat templates can read adapters that have none of these.
    """

    n: int
    """1, 2, … as in `name@v2`; never used again after a deletion."""
    digest: str
    upload_id: str
    created_at: float
    """Unix time."""
    by: str
    """Key id, or who else did it: "open", "cli", "config"."""
    size_bytes: int
    """Of the source files."""
    max_rank: int
    targets: list[str]
    """Kinds of modules, such as "q_proj", sorted."""
    bases: list[BaseRecord] = []
    """The base models that the content was checked against; empty where that was not recorded."""
    invocation_token_ids: list[int] = []
    """Of an activated LoRA: it changes nothing before the last place of a prompt where they are. Empty = it is none."""
    classifier: ClassifierRecord | None = None
    """None = it answers with text, or is for embeddings."""
    chat_template: str | None = None
    """What the server calls the one that its chats are rendered with; None = the base model's."""
    deleted_at: float | None = None


class Canary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int
    weight_bp: int
    """Share of users in hundredths of a percent, 0 to 10,000."""
    salt: str
    """Random; kept while the weight changes, so that who is in stays in."""


class Alias(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int
    previous: int | None = None
    """What rollback goes back to."""
    canary: Canary | None = None
    moved_at: float


class Tier(StrEnum):
    """Where an adapter's bytes are, from far to near."""

    DISK = "disk"
    HOST = "host"
    """Packed and mapped by the engine."""
    DEVICE = "device"
    """In the engine's arena."""


class Pin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tier: Tier
    until: float | None
    """Unix time; None = until it is taken off."""


LIVE_ALIAS = "live"
"""What the bare name of an adapter means."""


class AdapterDoc(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Its document id is `adapter_id(tenant, name)`."""

    tenant: str
    name: str
    description: str = ""
    tags: list[str] = []
    enabled: bool = True
    created_at: float
    versions: list[VersionRecord] = []
    """Oldest first."""
    aliases: dict[str, Alias] = {}
    pin: Pin | None = None
    deleted_at: float | None = None
    """Unix time; restorable for 24 h."""
    drain_until: float | None = None
    """Unix time; of a deleted adapter: requests that still run then are aborted."""


D = TypeVar("D", TenantDoc, KeyDoc, AdapterDoc)


class Document(msgspec.Struct, Generic[D], frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One revision. The revisions of a document are its audit trail."""

    kind: DocumentKind
    id: str
    rev: int
    """Each one more than the one before; the first is 1, or above all revisions of what was retired."""
    at: float
    """Unix time."""
    actor: str
    """Key id, "open", "cli", "config" or "server"."""
    action: str
    """What was done, such as "alias.move"."""
    request_id: str
    deleted: bool = False
    doc: D


AnyDocument = Document[TenantDoc] | Document[KeyDoc] | Document[AdapterDoc]


def adapter_id(tenant: str, name: str) -> str:
    """Neither part can contain a slash."""
    return f"{tenant}/{name}"
