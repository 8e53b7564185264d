"""The console's sessions: a cookie with a key's rights, until it expires or the key's secret stops working."""

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from loraserve.control.tenancy.authenticator import Authenticator
from loraserve.control.tenancy.login_attempts import LoginAttempts
from loraserve.control.tenancy.principal import Action, Principal
from loraserve.control.unavailable import live_unavailable, redis_required
from loraserve.live.audit import AuditEntry
from loraserve.live.errors import LiveUnavailableError
from loraserve.live.live_store import LiveStore
from loraserve.live.sessions import LINK_S, SESSION_S, LoginLink, Session
from loraserve.serving.errors import ErrorCode, ServingError
from loraserve.store.records import ANY_TENANT

TOKEN_BYTES = 32
REMEMBERED_S = 60.0
MAX_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class NewSession:
    token: str
    """For the cookie; only its hash is kept."""
    session: Session
    principal: Principal

    @property
    def expires_at(self) -> float:
        """Unix time."""
        return self.session.created_at + SESSION_S


@dataclass(frozen=True, slots=True)
class NewLink:
    token: str
    expires_at: float
    """Unix time."""


class SessionService:
    """Called on the event loop. Every method raises `ServingError`, 503 while Redis is gone."""

    def __init__(
        self,
        authenticator: Authenticator,
        live: LiveStore,
        attempts: LoginAttempts,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._authenticator = authenticator
        self._live = live
        self._attempts = attempts
        self._clock = clock
        self._found: OrderedDict[str, tuple[float, Session]] = OrderedDict()
        """By hash of the token: when the session was last found, and the session."""

    async def log_in_with_key(self, key: str, request_id: str) -> NewSession:
        principal = await self._authenticator.authenticate(key)
        if principal.is_open:
            message = "This server requires no key, so there is no login."
            raise ServingError(ErrorCode.INVALID_REQUEST, message)
        self._attempts.logs_in(_check_may_log_in(principal))
        return await self._begin(await self._authenticator.confirm(principal), request_id)

    async def log_in_with_token(self, token: str, request_id: str) -> NewSession:
        link = await _unused(self._live.sessions.get_link(_hash(token)))
        principal = await self._authenticator.of_key(link.key_id, sha256=link.key_sha256)
        principal = await self._authenticator.confirm(principal)
        # Only now, so that a client that has to retry still has the link.
        await _unused(self._live.sessions.take_link(_hash(token)))
        return await self._begin(principal, request_id)

    @property
    def is_open(self) -> bool:
        """Whether there is no login, because no key is required."""
        return self._authenticator.is_open

    async def find(self, token: str) -> Session | None:
        """While Redis is gone, a session that was found in the last minute counts as valid."""
        hashed = _hash(token)
        try:
            session = await self._live.sessions.get(hashed)
        except LiveUnavailableError as error:
            session = self._remembered(hashed)
            if session is None:
                raise live_unavailable() from error
            return session
        self._remember(hashed, session)
        return session

    async def principal(self, session: Session, acting_tenant: str | None) -> Principal:
        """What the session's key may do now; refused once the secret that opened the session stopped working."""
        return await self._authenticator.of_key(session.key_id, acting_tenant, sha256=session.key_sha256)

    async def log_out(self, token: str, request_id: str) -> None:
        """Takes effect on every server at once; does nothing if the session is over."""
        hashed = _hash(token)
        with redis_required():
            session = await self._live.sessions.get(hashed)
            if session is not None:
                await self._live.sessions.remove(session)
        self._remember(hashed, None)
        if session is not None:
            await self._note(session.key_id, "session.logout", await self._tenant_of(session.key_id), request_id)

    async def make_link(self, key_id: str, actor: str, request_id: str) -> NewLink:
        """A link for one login with the rights of this key, valid as long as the key's present secret."""
        principal = await self._authenticator.of_key(key_id)
        # Counted here rather than at the login, where a refusal would come after the link is used up.
        self._attempts.logs_in(_check_may_log_in(principal))
        token, link = new_link(key_id, self._authenticator.newest_sha256(key_id), self._clock())
        with redis_required():
            await self._live.sessions.put_link(link)
        await self._note(actor, "session.link", principal.tenant, request_id, key_id)
        return NewLink(token, link.created_at + LINK_S)

    async def _begin(self, principal: Principal, request_id: str) -> NewSession:
        """principal: from `Authenticator.confirm`."""
        key_id = _check_may_log_in(principal)
        assert principal.key_sha256 is not None
        token = secrets.token_urlsafe(TOKEN_BYTES)
        session = Session(
            token_sha256=_hash(token),
            key_id=key_id,
            key_sha256=principal.key_sha256,
            csrf=secrets.token_urlsafe(TOKEN_BYTES),
            created_at=self._clock(),
        )
        with redis_required():
            await self._live.sessions.put(session)
        await self._note(principal.actor, "session.login", principal.tenant, request_id)
        return NewSession(token, session, principal)

    async def _tenant_of(self, key_id: str) -> str:
        try:
            return (await self._authenticator.of_key(key_id)).tenant
        except ServingError:
            return ANY_TENANT

    def _remember(self, hashed: str, session: Session | None) -> None:
        self._found.pop(hashed, None)
        if session is not None:
            self._found[hashed] = (self._clock(), session)
        while len(self._found) > MAX_REMEMBERED:
            self._found.popitem(last=False)

    def _remembered(self, hashed: str) -> Session | None:
        found_at, session = self._found.get(hashed, (0.0, None))
        return session if self._clock() - found_at < REMEMBERED_S else None

    async def _note(self, actor: str, action: str, tenant: str, request_id: str, subject: str = "") -> None:
        """subject: id of a key; empty = the actor's own."""
        entry = AuditEntry(
            at=self._clock(),
            actor=actor,
            action=action,
            tenant=tenant,
            request_id=request_id,
            kind="session",
            id=subject or actor,
        )
        try:
            await self._live.audit.append(entry)
        except LiveUnavailableError:
            return


async def _unused(found: Awaitable[LoginLink | None]) -> LoginLink:
    with redis_required():
        link = await found
    if link is None:
        message = "This login link was already used or has expired. `loraserve ui login` creates another."
        raise ServingError(ErrorCode.INVALID_API_KEY, message)
    return link


def _check_may_log_in(principal: Principal) -> str:
    """Returns the id of its key. Raises `ServingError` (403)."""
    if principal.key_id is None or not principal.can(Action.READ):
        message = (
            "This key may only be used for inference. Log in with a key that has the role viewer, operator or admin."
        )
        raise ServingError(ErrorCode.FORBIDDEN, message)
    return principal.key_id


def new_link(key_id: str, key_sha256: str, now: float) -> tuple[str, LoginLink]:
    """The token for the user, and the record that is kept. key_sha256: of the key's secret."""
    token = secrets.token_urlsafe(TOKEN_BYTES)
    return token, LoginLink(token_sha256=_hash(token), key_id=key_id, key_sha256=key_sha256, created_at=now)


def is_csrf_token(session: Session, given: str | None) -> bool:
    """Compares in constant time."""
    return given is not None and hmac.compare_digest(session.csrf.encode(), given.encode())


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
