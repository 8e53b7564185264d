"""The authenticated caller and its rights."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.records import ANY_TENANT, Role

OPEN_ACTOR = "open"
"""Actor for callers of a server that requires no key."""
FLAG_KEY_ID = "flag"
"""Actor for keys given as `--api-key`, which have no document."""

MAX_NAMED = 10
"""Adapters of a key listed in an error."""


class Action(StrEnum):
    INFER = "infer"
    READ = "read"
    """Lists, documents, usage, live data of the tenant."""
    OPERATE = "operate"
    """Adapters, uploads, source files, aborting requests."""
    ADMINISTER = "administer"
    """The tenant's keys, audit, sessions for others, loading from paths."""
    ADMINISTER_ALL = "administer_all"
    """Tenants and the server's configuration: only with an admin key for all tenants (`*`)."""


ALLOWED: dict[Role, frozenset[Action]] = {
    Role.INFER: frozenset({Action.INFER}),
    Role.VIEWER: frozenset({Action.READ}),
    Role.OPERATOR: frozenset({Action.INFER, Action.READ, Action.OPERATE}),
    Role.ADMIN: frozenset({Action.INFER, Action.READ, Action.OPERATE, Action.ADMINISTER}),
}


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller, for one request or one session."""

    actor: str
    """Key id, "open", "flag", "cli", "config" or "server", as recorded in documents and usage lines."""
    role: Role
    tenant: str
    """The key's tenant; `ANY_TENANT` for a key for all tenants."""
    acting_tenant: str
    """The tenant whose adapters, limits and usage this request is about."""
    key_id: str | None = None
    """None without a key document."""
    key_rev: int = 0
    """Revision of the key document this was made from; 0 without one."""
    adapters: frozenset[str] | None = None
    """The only adapter names it may use; None = all that its tenant sees."""
    key_sha256: str | None = None
    """Hash of the secret that was sent; None without a key document."""
    is_old_secret: bool = False
    """Whether that secret had already been replaced by a rotation."""

    @property
    def is_any_tenant(self) -> bool:
        return self.tenant == ANY_TENANT

    @property
    def is_open(self) -> bool:
        return self.actor == OPEN_ACTOR

    def can(self, action: Action) -> bool:
        if action is Action.ADMINISTER_ALL:
            return self.role is Role.ADMIN and self.is_any_tenant
        return action in ALLOWED[self.role]

    def require(self, action: Action) -> None:
        """Raises `ServingError` (403)."""
        if not self.can(action):
            raise ServingError(ErrorCode.FORBIDDEN, _refusal(self, action))

    def may_use(self, adapter_name: str) -> bool:
        return self.adapters is None or adapter_name in self.adapters

    def require_adapter(self, name: str) -> None:
        """For an adapter that may not exist yet, so that a 404 would be wrong. Raises `ServingError` (403)."""
        if self.adapters is not None and name not in self.adapters:
            allowed = ", ".join(f"'{adapter}'" for adapter in sorted(self.adapters)[:MAX_NAMED])
            more = len(self.adapters) - MAX_NAMED
            listed = f"{allowed} and {more} more" if more > 0 else allowed or "none"
            message = f"The adapter '{name[:256]}' is not among those that this key may use: {listed}."
            raise ServingError(ErrorCode.FORBIDDEN, message)


def server_principal(tenant: str, actor: str) -> Principal:
    """For actions of the server or its command line itself, such as publishing `--lora-modules`."""
    return Principal(actor, Role.ADMIN, ANY_TENANT, tenant)


def roles_for(action: Action) -> Collection[Role]:
    if action is Action.ADMINISTER_ALL:
        return [Role.ADMIN]
    return [role for role in Role if action in ALLOWED[role]]


def _refusal(principal: Principal, action: Action) -> str:
    roles = " or ".join(f"'{role}'" for role in roles_for(action))
    scope = f" for all tenants ('{ANY_TENANT}')" if action is Action.ADMINISTER_ALL else ""
    return f"This needs a key with the role {roles}{scope}; yours has '{principal.role}'."
