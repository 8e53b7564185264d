"""Declared state: tenants, keys and adapters, as written to disk and mirrored in Redis."""

from enum import StrEnum
from typing import Generic, TypeGuard, TypeVar

import msgspec


class DocumentKind(StrEnum):
    TENANT = "tenant"
    KEY = "key"
    ADAPTER = "adapter"


DocumentRef = tuple[DocumentKind, str]
"""(Kind, id)."""


class Role(StrEnum):
    """What a key may do. Each role includes the rights of the roles before it, except that `viewer` may not infer."""

    INFER = "infer"
    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"


class Status(StrEnum):
    """Status of a tenant or a key. Revoking a key is final, suspending is not."""

    ACTIVE = "active"
    SUSPENDED = "suspended"
    REVOKED = "revoked"


ANY_TENANT = "*"
"""The `tenant` of a key for all tenants (`X-Tenant` selects the one it acts for)."""
DEFAULT_TENANT = "default"
"""Owner of an open server's requests."""
SHARED_TENANT = "shared"
"""Its adapters are visible to every tenant."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """None = no limit; 0 refuses everything (for `max_queued`: everything that would have to wait)."""

    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    """Prompt and output tokens."""
    max_concurrent: int | None = None
    """Requests in flight."""
    max_queued: int | None = None
    """Sequences waiting in an engine."""
    max_adapters: int | None = None
    """Tenants only, not keys."""
    max_adapter_bytes: int | None = None
    """Tenants only. All versions, including deleted ones still on disk; content shared with others counts in full."""


class TenantDoc(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """NOTE: fields at their defaults are not written, so that releases without tenant deletion can read all tenants
    that are not deleted."""

    status: Status = Status.ACTIVE
    description: str = ""
    limits: Limits = Limits()
    weight: float = 1.0
    """Share of the engine relative to other tenants."""
    kv_salt: str
    """Random; part of every prefix-cache hash, so that tenants share no blocks."""
    deleted_at: float | None = None
    """Unix time; restorable for 24 h. While deleted, its keys, adapters and uploads count as missing, but they are not
    changed: whether they are valid depends on this document."""
    is_erasing: bool = False
    """Final: the tenant cannot be restored, and everything it owned is being removed."""
    erased_at: float | None = None
    """Unix time when everything was gone. This document stays, so that no new tenant inherits the id and its usage."""


class KeyDoc(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An API key `ls-<id>_<secret>`. Only the hash of the secret is kept."""

    tenant: str
    """`ANY_TENANT` for a key for all tenants."""
    role: Role
    name: str = ""
    """Display name."""
    adapters: list[str] | None = None
    """Names it may use; None = all of the tenant's adapters and the shared ones."""
    limits: Limits = Limits()
    sha256: str
    """Hex hash of the whole key as the client sends it."""
    previous_sha256: str | None = None
    """Hash of the key before its rotation; that key works until `previous_until`."""
    previous_until: float | None = None
    """Unix time."""
    expires_at: float | None = None
    """Unix time."""
    status: Status = Status.ACTIVE
    created_at: float


class BaseRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A base model that an adapter's content fits."""

    name: str
    """Its name when the content was checked; for display only."""
    fingerprint: str
    """Hash of its linears' names and shapes; this decides whether content fits."""


class ClassifierRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The outputs of a classifier's head."""

    num_labels: int
    labels: list[str] = []
    """Label names; empty = the labels have none."""
    problem_type: str | None = None
    """See `AdapterConfig`."""
    score_template: str | None = None
    """See `AdapterConfig`."""

    def name_of(self, label: int) -> str:
        """Unnamed labels get the names that transformers gives them."""
        return self.labels[label] if self.labels else f"LABEL_{label}"


class VersionRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One immutable content of an adapter.

    NOTE: fields at their defaults are not written, so that releases without activated LoRA, classifiers, chat
    template names, trained tokens or the record of DoRA and rsLoRA can read adapters that use none of these.
    """

    n: int
    """1, 2, … as in `name@v2`; not reused after a deletion."""
    digest: str
    upload_id: str
    created_at: float
    """Unix time."""
    by: str
    """Key id, or another actor: "open" or "config"."""
    size_bytes: int
    """Size of the source files."""
    max_rank: int
    targets: list[str]
    """Module kinds such as "q_proj", sorted."""
    bases: list[BaseRecord] = []
    """The base models that the content was checked against; empty if that was not recorded."""
    invocation_token_ids: list[int] = []
    """Activated LoRA: no effect before their last occurrence in a prompt. Empty = not an activated LoRA."""
    classifier: ClassifierRecord | None = None
    """None = it generates text, or is for embeddings."""
    chat_template: str | None = None
    """The server's name for the template that renders its chats; None = the base model's template."""
    trained_token_ids: list[int] = []
    """Tokens with rows of its own in the embedding or `lm_head`, ascending."""
    own_tables: list[str] = []
    """Names of whole tables, the embedding or `lm_head`, that it has in place of the base's."""
    use_dora: bool = False
    use_rslora: bool = False
    """As in its config. False also if that was not recorded."""
    deleted_at: float | None = None


class Canary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int
    weight_bp: int
    """Share of users in hundredths of a percent, 0 to 10,000."""
    salt: str
    """Random; kept when the weight changes, so that users already in the canary stay in it."""


class Alias(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int
    previous: int | None = None
    """The version that a rollback restores."""
    canary: Canary | None = None
    moved_at: float


class Tier(StrEnum):
    """Where an adapter's bytes are, from farthest to nearest."""

    DISK = "disk"
    HOST = "host"
    """Packed and mapped by the engine."""
    DEVICE = "device"
    """In the engine's arena."""


class Pin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tier: Tier
    until: float | None
    """Unix time; None = until the pin is removed."""


LIVE_ALIAS = "live"
"""The alias that a bare adapter name refers to."""


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
    """Unix time, for a deleted adapter: requests still running then are aborted."""


D = TypeVar("D", bound=TenantDoc | KeyDoc | AdapterDoc, covariant=True)


class Document(msgspec.Struct, Generic[D], frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One revision. The revisions of a document are its audit trail."""

    kind: DocumentKind
    id: str
    rev: int
    """Increases by one each time; the first is 1, or higher than every revision of the kind's retired documents."""
    at: float
    """Unix time."""
    actor: str
    """Key id, "open", "cli", "config" or "server"."""
    action: str
    """The action, such as "alias.move"."""
    request_id: str
    deleted: bool = False
    doc: D


AnyDocument = Document[TenantDoc | KeyDoc | AdapterDoc]


def is_a(document: AnyDocument | None, kind: type[D]) -> TypeGuard[Document[D]]:
    """Whether it is a document of this kind; False if there is none."""
    return document is not None and isinstance(document.doc, kind)


def adapter_id(tenant: str, name: str) -> str:
    """Neither part can contain a slash."""
    return f"{tenant}/{name}"
