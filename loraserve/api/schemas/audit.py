"""/v1/audit: who changed what."""

from typing import Any

import msgspec


class AuditItem(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    at: float
    """Unix seconds."""
    actor: str
    """Key id, "open", "cli", "config" or "server"; "unknown" for whoever came without a good key."""
    action: str
    """Such as "alias.move", "key.create" or "session.login"."""
    outcome: str
    """ "done" or "refused"."""
    kind: str
    """ "tenant", "key", "adapter" or "session"; of a refusal also "request"."""
    subject: str
    """Id of what was changed; of a refusal, what was asked for."""
    tenant: str
    request_id: str
    detail: str
    """Of a refusal: from where, and why."""
    before: dict[str, Any] | None
    """The document before; secrets' hashes left out."""
    after: dict[str, Any] | None
    object: str = "audit.entry"


class AuditList(msgspec.Struct, frozen=True):
    """Newest first."""

    data: list[AuditItem]
    next_cursor: str | None
    object: str = "list"
