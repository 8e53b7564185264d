"""/v1/session: the console's login."""

import msgspec


class CreateSessionRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Exactly one of `key` and `token`."""

    key: str | None = None
    """An API key with the role "viewer", "operator" or "admin"."""
    token: str | None = None
    """The token of a one-time link."""


class SessionItem(msgspec.Struct, frozen=True, kw_only=True):
    """The caller's identity and rights."""

    open: bool
    """True: the server requires no key, and everyone on its machine is an admin."""
    role: str
    """ "infer", "viewer", "operator" or "admin"."""
    tenant: str
    """ "*" = all tenants: the header `X-Tenant` selects the one to act for."""
    key_id: str | None
    """Null if no key with an id is in use."""
    name: str
    """Display name of the key."""
    csrf: str
    """Send it as the header `X-CSRF-Token` with every request that changes something. Empty without a session."""
    expires_at: float | None
    """End of the session; Unix seconds. Null without a session."""
    model: str
    """The base model's name."""
    version: str
    """Version of the server."""
    object: str = "session"


class CreateLinkRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key_id: str | None = None
    """The key whose rights the link gives. Left out: your own."""


class LinkItem(msgspec.Struct, frozen=True):
    """A one-time link to log in to the console."""

    token: str
    """For one POST /v1/session. It belongs in the fragment of the URL: /ui/#/login/<token>."""
    expires_at: float
    """Unix seconds."""
    object: str = "session.link"
