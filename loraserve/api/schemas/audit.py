"""/v1/audit: who changed what."""

from typing import Any

import msgspec


class AuditItem(msgspec.Struct, frozen=True, kw_only=True):
    """One change, login or refusal."""

    id: str
    at: float
    """Unix seconds."""
    actor: str
    """Key id, "open", "flag", "cli", "config" or "server"; "unknown" = a caller without a valid key."""
    action: str
    """For example "alias.move", "key.create" or "session.login"."""
    outcome: str
    """ "done" or "refused"."""
    kind: str
    """ "tenant", "key", "adapter" or "session"; for a refusal also "request"."""
    subject: str
    """Id of the changed object; for a refusal, what the caller requested."""
    tenant: str
    """The tenant concerned; "*" = the whole server."""
    request_id: str
    detail: str
    """For a refusal, the client's address and the reason."""
    before: dict[str, Any] | None
    """The document before the change, without hashes of secrets; null if there was none or its revision was pruned."""
    after: dict[str, Any] | None
    """The document after the change; null as for `before`."""
    object: str = "audit.entry"


class AuditList(msgspec.Struct, frozen=True):
    """Newest first."""

    data: list[AuditItem]
    next_cursor: str | None
    """Send it as `cursor` to get the next page; null on the last page."""
    object: str = "list"
