"""/v1/session: who is logged in to the console."""

import msgspec


class CreateSessionRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Exactly one of the two."""

    key: str | None = None
    """An API key with the role viewer, operator or admin."""
    token: str | None = None
    """Of a one-time link."""


class SessionItem(msgspec.Struct, frozen=True, kw_only=True):
    open: bool
    """The server requires no key: anyone on its machine is admin."""
    role: str
    """ "infer", "viewer", "operator" or "admin"."""
    tenant: str
    """ "*" = all of them; X-Tenant then says for which one to act."""
    key_id: str | None
    name: str
    """Of the key, for people."""
    csrf: str
    """To be sent as X-CSRF-Token with every request that changes something; empty for a server that is open."""
    expires_at: float | None
    """Unix seconds."""
    model: str
    """The base model's name."""
    version: str
    """Of the server."""
    object: str = "session"


class CreateLinkRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key_id: str | None = None
    """Whose rights the link gives; left out = your own."""


class LinkItem(msgspec.Struct, frozen=True):
    token: str
    """For POST /v1/session, once. It goes into the fragment of /ui/#/login/<token>."""
    expires_at: float
    """Unix seconds."""
    object: str = "session.link"
